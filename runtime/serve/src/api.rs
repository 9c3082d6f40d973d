//! Requests: what OpenAI's API lets clients say, as far as one engine with one answer can do it.
//!
//! What would change an answer and is not supported is refused, not ignored. Fields that are unknown are ignored, as
//! clients send more than they need. `top_k`, `min_p` and `repeat_penalty` are ours.

use crate::error::ApiError;
use axum::http::StatusCode;
use ls_chat::Message;
use ls_engine::sampler::SamplerOptions;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Stop strings of a request.
const MAX_STOP: usize = 4;
/// Bytes of one.
const MAX_STOP_BYTES: usize = 256;

/// What a body asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// The next turn of a conversation.
    Chat,
    /// A text's continuation.
    Completion,
}

/// Checks a body as the server does before anything is computed; the error is what a client would be told.
///
/// # Errors
/// If it is no request, or asks for what cannot be done.
pub fn check(question: Question, body: &[u8]) -> Result<(), String> {
    let told = |error: ApiError| error.json().to_string();
    let options = match question {
        Question::Chat => {
            let mut request: ChatRequest = read(body).map_err(told)?;
            let options = std::mem::take(&mut request.options);
            request.messages().map_err(told)?;
            options
        }
        Question::Completion => read::<TextRequest>(body).map_err(told)?.options,
    };
    options.check("model", 0).map(drop).map_err(told)
}

/// A body as the request that it should be.
pub(crate) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError::invalid(error.to_string()))
}

/// `POST /v1/chat/completions`.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatRequest {
    messages: Vec<ChatMessage>,
    #[serde(flatten)]
    pub(crate) options: Options,
}

#[derive(Debug, Deserialize)]
struct ChatMessage {
    role: String,
    content: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// `POST /v1/completions`.
#[derive(Debug, Deserialize)]
pub(crate) struct TextRequest {
    pub(crate) prompt: Prompt,
    #[serde(flatten)]
    pub(crate) options: Options,
}

/// A text to continue.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
}

/// What both kinds of request have.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Options {
    model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<Stop>,
    n: Option<u32>,
    best_of: Option<u32>,
    echo: Option<bool>,
    suffix: Option<String>,
    logprobs: Option<Value>,
    logit_bias: Option<Value>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    response_format: Option<Value>,
    tools: Option<Value>,
    functions: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Many(Vec<String>),
}

/// Options that were found possible.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Checked {
    /// Piece by piece.
    pub(crate) stream: bool,
    /// A last piece says what was used.
    pub(crate) include_usage: bool,
    /// None: as many as the context holds, or as usual for the kind of request.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) sampler: SamplerOptions,
    pub(crate) stop: Vec<String>,
}

impl ChatRequest {
    /// The conversation.
    pub(crate) fn messages(self) -> Result<Vec<Message>, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::field("messages", "messages is empty"));
        }
        self.messages.into_iter().map(ChatMessage::message).collect()
    }
}

impl ChatMessage {
    fn message(self) -> Result<Message, ApiError> {
        let role = match self.role.as_str() {
            // What newer clients call it.
            "developer" => "system",
            "system" | "user" | "assistant" => &self.role,
            other => {
                let text =
                    format!("role {other:?} is not supported: use system, user or assistant");
                return Err(ApiError::field("messages", text));
            }
        };
        let content = match self.content {
            None => return Err(ApiError::field("messages", "a message without content")),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                parts.into_iter().map(Part::text).collect::<Result<_, _>>()?
            }
        };
        Ok(Message::new(role, content))
    }
}

impl Part {
    fn text(self) -> Result<String, ApiError> {
        match (self.kind.as_str(), self.text) {
            ("text", Some(text)) => Ok(text),
            (kind, _) => {
                let text =
                    format!("content of type {kind:?} is not supported: this model reads text");
                Err(ApiError::field("messages", text))
            }
        }
    }
}

impl Options {
    /// Checks everything. `model` is the one that is served; `seed` is for requests without one.
    pub(crate) fn check(self, model: &str, seed: u64) -> Result<Checked, ApiError> {
        if let Some(other) = self.model.as_deref().filter(|&other| other != model) {
            let text = format!("there is no model {other:?} here, only {model:?}");
            return Err(ApiError::refused(StatusCode::NOT_FOUND, text).code("model_not_found"));
        }
        self.check_unsupported()?;
        let within = |param: &'static str, value: Option<f32>, default: f32, most: f32| {
            let value = value.unwrap_or(default);
            if (0.0..=most).contains(&value) {
                return Ok(value);
            }
            Err(ApiError::field(param, format!("{param} is {value}, 0 to {most} is possible")))
        };
        let sampler = SamplerOptions {
            temperature: within("temperature", self.temperature, 1.0, 2.0)?,
            top_k: self.top_k.unwrap_or(0),
            top_p: within("top_p", self.top_p, 1.0, 1.0)?,
            min_p: within("min_p", self.min_p, 0.0, 1.0)?,
            repeat_penalty: within("repeat_penalty", self.repeat_penalty, 1.0, 10.0)?,
            seed: self.seed.map_or(seed, |seed| seed as u64),
        };
        if sampler.repeat_penalty == 0.0 {
            return Err(ApiError::field("repeat_penalty", "repeat_penalty must be above 0"));
        }
        let max_tokens = self.max_completion_tokens.or(self.max_tokens);
        if max_tokens == Some(0) {
            return Err(ApiError::field("max_tokens", "max_tokens must be at least 1"));
        }
        let stop = match self.stop {
            None => Vec::new(),
            Some(Stop::One(text)) => vec![text],
            Some(Stop::Many(texts)) => texts,
        };
        if stop.len() > MAX_STOP || stop.iter().any(|s| s.is_empty() || s.len() > MAX_STOP_BYTES) {
            let text = format!("stop takes up to {MAX_STOP} texts of 1 to {MAX_STOP_BYTES} bytes");
            return Err(ApiError::field("stop", text));
        }
        Ok(Checked {
            stream: self.stream.unwrap_or(false),
            include_usage: self.stream_options.is_some_and(|o| o.include_usage == Some(true)),
            max_tokens,
            sampler,
            stop,
        })
    }

    fn check_unsupported(&self) -> Result<(), ApiError> {
        let asks = |value: &Option<Value>| match value {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Array(list)) => !list.is_empty(),
            Some(Value::Object(fields)) => !fields.is_empty(),
            Some(_) => true,
        };
        let formatted = self.response_format.as_ref().is_some_and(|f| f["type"] != "text");
        let fields = [
            ("n", self.n.is_some_and(|n| n != 1)),
            ("best_of", self.best_of.is_some_and(|n| n != 1)),
            ("echo", self.echo == Some(true)),
            ("suffix", self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty())),
            ("logprobs", asks(&self.logprobs)),
            ("logit_bias", asks(&self.logit_bias)),
            ("frequency_penalty", self.frequency_penalty.is_some_and(|p| p != 0.0)),
            ("presence_penalty", self.presence_penalty.is_some_and(|p| p != 0.0)),
            ("response_format", formatted),
            ("tools", asks(&self.tools)),
            ("functions", asks(&self.functions)),
        ];
        match fields.iter().find(|(_, asked)| *asked) {
            None => Ok(()),
            Some((param, _)) => {
                Err(ApiError::field(param, format!("{param} is not supported")).code("unsupported"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str) -> Result<Checked, String> {
        let options: Options = serde_json::from_str(json).map_err(|error| error.to_string())?;
        options.check("m", 7).map_err(|error| error.json()["error"]["message"].to_string())
    }

    #[test]
    fn what_is_not_said_is_openais_default() {
        let checked = check(r#"{"user": "ignored", "n": 1, "stop": null, "tools": []}"#).unwrap();
        assert_eq!(
            (checked.stream, checked.include_usage, checked.max_tokens),
            (false, false, None)
        );
        let sampler = SamplerOptions { temperature: 1.0, seed: 7, ..SamplerOptions::default() };
        assert_eq!((checked.sampler, checked.stop), (sampler, Vec::new()));
    }

    #[test]
    fn what_would_change_an_answer_and_cannot_be_done_is_refused() {
        for (json, word) in [
            (r#"{"model": "other"}"#, "only"),
            (r#"{"n": 2}"#, "n is not supported"),
            (r#"{"logprobs": true}"#, "logprobs"),
            (r#"{"logprobs": 0}"#, "logprobs"),
            (r#"{"tools": [{}]}"#, "tools"),
            (r#"{"presence_penalty": 0.5}"#, "presence_penalty"),
            (r#"{"response_format": {"type": "json_object"}}"#, "response_format"),
            (r#"{"temperature": 2.5}"#, "temperature is 2.5"),
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"top_p": 1.5}"#, "top_p"),
            (r#"{"max_tokens": 0}"#, "max_tokens"),
            (r#"{"max_tokens": -1}"#, "invalid value"),
            (r#"{"stop": ["a", "b", "c", "d", "e"]}"#, "stop"),
            (r#"{"stop": ""}"#, "stop"),
            (r#"{"stream": "yes"}"#, "invalid type"),
        ] {
            let error = check(json).unwrap_err();
            assert!(error.contains(word), "{json}: {error}");
        }
    }

    #[test]
    fn messages_are_texts_or_parts_that_are_texts() {
        let messages = |json: &str| {
            let request: Result<ChatRequest, _> = serde_json::from_str(json);
            request.map_err(|e| e.to_string())?.messages().map_err(|e| e.json().to_string())
        };
        let found = messages(
            r#"{"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"},
                {"type": "text", "text": "b"}]}, {"role": "user", "content": "c", "name": "x"}]}"#,
        );
        assert_eq!(found, Ok(vec![Message::new("system", "ab"), Message::new("user", "c")]));
        for bad in [
            r#"{}"#,
            r#"{"messages": []}"#,
            r#"{"messages": "hello"}"#,
            r#"{"messages": [{"role": "user"}]}"#,
            r#"{"messages": [{"role": "tool", "content": "x"}]}"#,
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#,
        ] {
            assert!(messages(bad).is_err(), "{bad}");
        }
    }
}
