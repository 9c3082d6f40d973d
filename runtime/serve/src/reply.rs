//! Answers in OpenAI's shapes: whole, or piece by piece as server-sent events.

use crate::decoder::{Event, Failure};
use crate::error::ApiError;
use axum::Json;
use axum::http::StatusCode;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use ls_run::answer::{Answer, End};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::UnboundedReceiver;

/// Which of the two interfaces was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `chat.completion`.
    Chat,
    /// `text_completion`.
    Text,
}

/// What all parts of one answer have in common.
#[derive(Debug)]
pub(crate) struct Reply {
    shape: Shape,
    id: String,
    created_s: u64,
    model: String,
}

impl Reply {
    /// A reply that begins now.
    pub(crate) fn new(shape: Shape, model: &str) -> Reply {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let prefix = if shape == Shape::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:x}", now.as_nanos());
        Reply { shape, id, created_s: now.as_secs(), model: model.to_owned() }
    }

    /// Waits for all of the answer.
    pub(crate) async fn whole(
        self,
        mut events: UnboundedReceiver<Event>,
    ) -> Result<Response, ApiError> {
        let mut text = String::new();
        let answer = loop {
            match events.recv().await {
                Some(Event::Text(piece)) => text.push_str(&piece),
                Some(Event::Done(answer)) if answer.end != End::Cancelled => break answer,
                Some(Event::Failed(failure)) => return Err(failed(failure)),
                Some(Event::Done(_)) | None => return Err(stopping()),
            }
        };
        let choice = match self.shape {
            Shape::Chat => json!({ "message": { "role": "assistant", "content": text } }),
            Shape::Text => json!({ "text": text }),
        };
        let mut object = self.object(choice, Some(&answer), "chat.completion");
        object["usage"] = usage(&answer);
        Ok(Json(object).into_response())
    }

    /// Sends the answer as it comes.
    pub(crate) fn stream(self, events: UnboundedReceiver<Event>, include_usage: bool) -> Response {
        let mut ready = VecDeque::new();
        if self.shape == Shape::Chat {
            ready.push_back(self.piece(json!({ "role": "assistant", "content": "" })).to_string());
        }
        let pieces = Pieces { reply: self, events, include_usage, ready, over: false };
        Sse::new(pieces).keep_alive(KeepAlive::default()).into_response()
    }

    fn object(&self, mut choice: Value, answer: Option<&Answer>, chat: &str) -> Value {
        choice["index"] = 0.into();
        choice["logprobs"] = Value::Null;
        choice["finish_reason"] = match answer.map(|answer| answer.end) {
            None => Value::Null,
            Some(End::Length) => "length".into(),
            Some(End::Stop | End::Cancelled) => "stop".into(),
        };
        let object = if self.shape == Shape::Chat { chat } else { "text_completion" };
        json!({
            "id": self.id, "object": object, "created": self.created_s, "model": self.model,
            "choices": [choice],
        })
    }

    fn piece(&self, delta: Value) -> Value {
        self.object(json!({ "delta": delta }), None, "chat.completion.chunk")
    }

    fn text(&self, text: &str) -> Value {
        match self.shape {
            Shape::Chat => self.piece(json!({ "content": text })),
            Shape::Text => self.object(json!({ "text": text }), None, ""),
        }
    }

    fn last(&self, answer: &Answer) -> Value {
        let choice = match self.shape {
            Shape::Chat => json!({ "delta": {} }),
            Shape::Text => json!({ "text": "" }),
        };
        self.object(choice, Some(answer), "chat.completion.chunk")
    }
}

/// The pieces of an answer as events. Dropping it tells the decoder that nobody listens any more.
struct Pieces {
    reply: Reply,
    events: UnboundedReceiver<Event>,
    include_usage: bool,
    /// What can be sent at once.
    ready: VecDeque<String>,
    over: bool,
}

impl Pieces {
    fn take(&mut self, event: Option<Event>) {
        match event {
            Some(Event::Text(text)) => self.ready.push_back(self.reply.text(&text).to_string()),
            Some(Event::Done(answer)) if answer.end != End::Cancelled => {
                self.ready.push_back(self.reply.last(&answer).to_string());
                if self.include_usage {
                    let mut object = self.reply.last(&answer);
                    object["choices"] = json!([]);
                    object["usage"] = usage(&answer);
                    self.ready.push_back(object.to_string());
                }
                self.end();
            }
            Some(Event::Failed(failure)) => self.fail(&failed(failure)),
            Some(Event::Done(_)) | None => self.fail(&stopping()),
        }
    }

    fn fail(&mut self, error: &ApiError) {
        self.ready.push_back(error.json().to_string());
        self.end();
    }

    fn end(&mut self) {
        self.ready.push_back("[DONE]".into());
        self.over = true;
    }
}

impl Stream for Pieces {
    type Item = Result<sse::Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(sse::Event::default().data(data))));
            }
            if self.over {
                return Poll::Ready(None);
            }
            let Poll::Ready(event) = self.events.poll_recv(context) else { return Poll::Pending };
            self.take(event);
        }
    }
}

fn usage(answer: &Answer) -> Value {
    json!({
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
        "prompt_tokens_details": { "cached_tokens": answer.reused_tokens },
    })
}

fn failed(failure: Failure) -> ApiError {
    match failure {
        Failure::Late => ApiError::server(StatusCode::GATEWAY_TIMEOUT, "the answer took too long")
            .code("timeout"),
        Failure::Engine(text) => ApiError::server(StatusCode::INTERNAL_SERVER_ERROR, text),
    }
}

fn stopping() -> ApiError {
    ApiError::server(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping")
}
