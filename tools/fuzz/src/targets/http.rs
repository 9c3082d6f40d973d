//! What clients send to `ls-serve`.

use crate::target::Target;
use ls_serve::api::{Question, check};

const WORDS: &[&str] = &[
    "null",
    "true",
    "false",
    "{}",
    "[]",
    "[[",
    "{\"a\":",
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "messages",
    "role",
    "content",
    "system",
    "user",
    "assistant",
    "tool",
    "developer",
    "type",
    "text",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "n",
    "stream",
    "stream_options",
    "include_usage",
    "logprobs",
    "model",
    "response_format",
    "repeat_penalty",
    "NaN",
    "1e999",
    "-0",
    "4294967296",
];

pub(crate) const CHAT: Target = Target {
    words: WORDS,
    ..Target::new("http-chat", "bodies of chat requests", |_| {
        Box::new(|bytes| drop(check(Question::Chat, bytes)))
    })
};

pub(crate) const COMPLETION: Target = Target {
    words: WORDS,
    ..Target::new("http-completion", "bodies of completion requests", |_| {
        Box::new(|bytes| drop(check(Question::Completion, bytes)))
    })
};
