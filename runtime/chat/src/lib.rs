//! A conversation as the text that a model was trained to continue: its own chat template, as Hugging Face renders it.
//!
//! The template is a Jinja program that comes with the model and lies in the bundle. [`ChatTemplate`] gives it what
//! `apply_chat_template` does: the messages, `add_generation_prompt`, the special tokens, `raise_exception`,
//! `strftime_now`, Python's string methods, blocks that take their line's whitespace with them. Left out: tools and
//! documents, which are always none; `{% generation %}`, which only training uses; local time, as dates are in UTC.
#![forbid(unsafe_code)]

mod date;

use ls_bundle::Bundle;
use ls_bundle::ids::TokenId;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, ErrorKind, context};
use std::time::SystemTime;

/// Steps that a template may take, and with them the memory: one that does not end, or that grows without end, is stopped.
/// A message costs a few dozen, and one for each 64 bytes that are made of it; all together make 25 MB at most.
const MAX_STEPS: u64 = 400_000;
/// The only template's name.
const NAME: &str = "chat template";

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant`; which others there are is up to the template.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into() }
    }
}

/// Why a conversation has no text. Opaque: print it.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct TemplateError(#[from] Inner);

#[derive(Debug, thiserror::Error)]
enum Inner {
    #[error("this model has no chat template: it is not made for conversations")]
    Missing,
    #[error("the model's chat template cannot be used: {0}")]
    Unusable(minijinja::Error),
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
}

impl TemplateError {
    /// Whether another conversation could have a text: it was the template that refused this one.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self.0, Inner::Refused(_))
    }
}

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// The bundle's template. Its `eos_token` is the first token that ends generation: templates that write one belong
    /// to models that have one.
    pub fn of(bundle: &Bundle) -> Result<ChatTemplate, TemplateError> {
        let source = bundle.chat_template().ok_or(Inner::Missing)?;
        let special = &bundle.model().special;
        let text = |token: Option<u32>| {
            let piece = token.map_or(&[][..], |token| bundle.vocabulary().piece(TokenId(token)));
            String::from_utf8_lossy(piece).into_owned()
        };
        ChatTemplate::new(source, &text(special.bos), &text(special.stop.first().copied()))
    }

    /// Compiles a template for a model whose texts begin with `bos` and end with `eos`.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the usual delimiters are allowed"));
        environment.set_fuel(Some(MAX_STEPS));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |reason: String| -> Result<Value, _> {
            let error = minijinja::Error::new(ErrorKind::InvalidOperation, reason.clone());
            Err(error.with_source(Refusal(reason)))
        });
        environment.add_template_owned(NAME, source.to_owned()).map_err(Inner::Unusable)?;
        Ok(ChatTemplate { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The text of a conversation up to where the model's next answer begins. `now` is the date that templates show.
    pub fn render(&self, messages: &[Message], now: SystemTime) -> Result<String, TemplateError> {
        self.render_with(messages, now, true)
    }

    /// The same; `answer`: whether an answer is to follow.
    pub fn render_with(
        &self,
        messages: &[Message],
        now: SystemTime,
        answer: bool,
    ) -> Result<String, TemplateError> {
        let message = |message: &Message| {
            context! { role => message.role.as_str(), content => message.content.as_str() }
        };
        let strftime_now = move |format: String| date::format(&format, now);
        let given = context! {
            messages => messages.iter().map(message).collect::<Vec<Value>>(),
            tools => Value::from(()),
            documents => Value::from(()),
            add_generation_prompt => answer,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            strftime_now => Value::from_function(strftime_now),
        };
        let template = self.environment.get_template(NAME).expect("it was added when made");
        template.render(given).map_err(|error| match refusal(&error) {
            Some(reason) => Inner::Refused(reason).into(),
            None => Inner::Unusable(error).into(),
        })
    }
}

/// What a template gave `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// The template's own reason, if it was the template that failed and not its rendering.
fn refusal(error: &minijinja::Error) -> Option<String> {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        if let Some(Refusal(reason)) = error.downcast_ref() {
            return Some(reason.clone());
        }
        cause = error.source();
    }
    None
}
