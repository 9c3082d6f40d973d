//! What can be asked for, and the way from a request to the decoder.

use crate::api::{self, ChatRequest, Checked, Options, Prompt, TextRequest};
use crate::decoder::{Ask, Decoder};
use crate::error::ApiError;
use crate::guard;
use crate::reply::{Reply, Shape};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use ls_bundle::ids::ByteCount;
use ls_chat::{ChatTemplate, TemplateError};
use ls_engine::memory::MemoryPlan;
use ls_engine::tokenizer::Tokenizer;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The page: one file that needs nothing from elsewhere.
const PAGE: &str = include_str!("page.html");
/// What the page may do: run its own script and talk to this server.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
    img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Tokens of a completion that does not say: OpenAI's number.
const COMPLETION_TOKENS: u32 = 16;

/// What all requests share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) decoder: Arc<Decoder>,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Result<ChatTemplate, TemplateError>,
    pub(crate) name: String,
    /// Tokens below this exist.
    pub(crate) vocab_size: u32,
    /// The policies, for people.
    pub(crate) system: Value,
    pub(crate) plan: MemoryPlan,
    pub(crate) key: Option<String>,
    pub(crate) max_body: ByteCount,
    pub(crate) answer_timeout: Duration,
    pub(crate) client_timeout: Duration,
}

/// Everything the server answers to.
pub(crate) fn router(app: App) -> Router {
    let app = Arc::new(app);
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{name}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(complete))
        .route("/metrics", get(metrics))
        .route("/stats", get(stats))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&app), guard::key))
        .route("/health", get(health))
        .route("/", get(page))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&app), guard::host))
        .with_state(app)
}

async fn page() -> Response {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE).into_response()
}

async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

async fn unknown() -> ApiError {
    ApiError::refused(StatusCode::NOT_FOUND, "there is nothing at this address")
}

async fn wrong_method() -> ApiError {
    ApiError::refused(StatusCode::METHOD_NOT_ALLOWED, "this address wants another method")
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [app.model()] }))
}

async fn model(
    State(app): State<Arc<App>>,
    axum::extract::Path(name): axum::extract::Path<String>,
) -> Result<Json<Value>, ApiError> {
    if name == app.name {
        return Ok(Json(app.model()));
    }
    let text = format!("there is no model {name:?} here, only {:?}", app.name);
    Err(ApiError::refused(StatusCode::NOT_FOUND, text).code("model_not_found"))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.decoder.figures().prometheus(resident_bytes(), app.plan.budget.0);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// The figures that the page shows.
async fn stats(State(app): State<Arc<App>>) -> Json<Value> {
    let figures = app.decoder.figures();
    let cache = figures.cache.map(|counts| {
        json!({ "requests": counts.requests(), "hits": counts.demand_hits + counts.prefetch_hits })
    });
    Json(json!({
        "model": app.name,
        "can_chat": app.template.is_ok(),
        "system": app.system,
        "plan": ls_run::plan_json(&app.plan),
        "resident_bytes": resident_bytes(),
        "peak_resident_bytes": ls_io::memory::peak_resident_bytes().unwrap_or(0),
        "running": figures.running,
        "waiting": figures.waiting,
        "answered": figures.answered,
        "position": figures.position,
        "context": figures.context,
        "prefill_tokens": figures.stats.prefill_tokens,
        "decode_tokens": figures.stats.decode_tokens,
        "prefill_s": figures.stats.prefill.as_secs_f64(),
        "decode_s": figures.stats.decode.as_secs_f64(),
        "stalled_s": figures.stats.stalled.as_secs_f64(),
        "tok_s": figures.tok_s,
        "bytes_read": figures.bytes_read,
        "cache": cache,
    }))
}

async fn chat(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let mut request: ChatRequest = app.read(&headers, body).await?;
    let checked = app.check(std::mem::take(&mut request.options))?;
    let messages = request.messages()?;
    let template = app.template.as_ref().map_err(|error| ApiError::invalid(error.to_string()))?;
    let text = template.render(&messages, SystemTime::now()).map_err(|error| {
        if error.is_refusal() {
            ApiError::field("messages", error.to_string())
        } else {
            ApiError::server(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
        }
    })?;
    drop(messages);
    // A template spells out every special token.
    let tokens = app.encode(&text, false)?;
    app.answer(Shape::Chat, tokens, checked).await
}

async fn complete(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let request: TextRequest = app.read(&headers, body).await?;
    let mut checked = app.check(request.options)?;
    checked.max_tokens = checked.max_tokens.or(Some(COMPLETION_TOKENS));
    let tokens = match request.prompt {
        Prompt::Text(text) => app.encode(&text, true)?,
        Prompt::Texts(texts) => match &texts[..] {
            [text] => app.encode(text, true)?,
            _ => return Err(ApiError::field("prompt", "one prompt a request is supported")),
        },
        Prompt::Tokens(tokens) => app.known(tokens)?,
    };
    app.answer(Shape::Text, tokens, checked).await
}

impl App {
    fn model(&self) -> Value {
        json!({ "id": self.name, "object": "model", "created": 0, "owned_by": "leanstream" })
    }

    /// A request's body. Only as JSON: any page may make a browser send other types here without being asked.
    async fn read<T: DeserializeOwned>(
        &self,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<T, ApiError> {
        let kind =
            headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if !kind
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .eq_ignore_ascii_case("application/json")
        {
            let text = "requests are JSON: Content-Type: application/json";
            return Err(ApiError::refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, text));
        }
        let read = axum::body::to_bytes(body, self.max_body.0 as usize);
        let bytes: Bytes = match tokio::time::timeout(self.client_timeout, read).await {
            Ok(Ok(bytes)) => bytes,
            // Or the client left, and does not hear this.
            Ok(Err(_)) => {
                let text = format!("a request may have at most {} bytes", self.max_body.0);
                return Err(ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, text));
            }
            Err(_) => {
                let text = "the request did not come in time";
                return Err(ApiError::refused(StatusCode::REQUEST_TIMEOUT, text));
            }
        };
        api::read(&bytes)
    }

    fn check(&self, options: Options) -> Result<Checked, ApiError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        options.check(&self.name, now.as_nanos() as u64)
    }

    fn encode(&self, text: &str, start: bool) -> Result<Vec<u32>, ApiError> {
        self.tokenizer.encode(text, start).map_err(|error| ApiError::invalid(error.to_string()))
    }

    /// Tokens that a client chose must be in the vocabulary.
    fn known(&self, tokens: Vec<u32>) -> Result<Vec<u32>, ApiError> {
        let size = self.vocab_size;
        match tokens.iter().find(|&&token| token >= size) {
            Some(token) => Err(ApiError::field(
                "prompt",
                format!("there is no token {token}; there are {size}"),
            )),
            None => Ok(tokens),
        }
    }

    /// Queues the prompt and replies with its answer.
    async fn answer(
        &self,
        shape: Shape,
        tokens: Vec<u32>,
        checked: Checked,
    ) -> Result<Response, ApiError> {
        if tokens.is_empty() {
            return Err(ApiError::invalid("the prompt is empty"));
        }
        let context = self.plan.context;
        if tokens.len() as u64 > u64::from(context) {
            let text =
                format!("the prompt has {} tokens, the context holds {context}", tokens.len());
            return Err(ApiError::invalid(text).code("context_length_exceeded"));
        }
        let ask = Ask {
            tokens,
            sampler: checked.sampler,
            max_tokens: checked.max_tokens.unwrap_or(u32::MAX),
            stop: checked.stop,
            deadline: Instant::now() + self.answer_timeout,
        };
        let events = self
            .decoder
            .submit(ask)
            .map_err(|_full| ApiError::busy(self.decoder.figures().retry_after_s()))?;
        let reply = Reply::new(shape, &self.name);
        if checked.stream {
            return Ok(reply.stream(events, checked.include_usage));
        }
        reply.whole(events).await
    }
}

fn resident_bytes() -> u64 {
    // A figure for people: 0 where the kernel does not say.
    ls_io::memory::resident_bytes().unwrap_or(0)
}
