//! [`ApiError`]: an error as clients of OpenAI's API expect it.

use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// What a client is told.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    /// The field that is wrong.
    param: Option<&'static str>,
    message: String,
    retry_after_s: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        let message = message.into();
        ApiError { status, kind, code: None, param: None, message, retry_after_s: None }
    }

    /// The request is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field of the request is wrong.
    pub(crate) fn field(param: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param), ..ApiError::invalid(message) }
    }

    /// The request is wrong in a way that has its own status.
    pub(crate) fn refused(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError::new(status, "invalid_request_error", message)
    }

    /// Another code for programs.
    pub(crate) fn code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// Too many requests wait.
    pub(crate) fn busy(retry_after_s: u64) -> ApiError {
        let message = format!("too many requests wait; try again in {retry_after_s} s");
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        ApiError { retry_after_s: Some(retry_after_s), ..error.code("queue_full") }
    }

    /// Not the client's fault.
    pub(crate) fn server(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError::new(status, "server_error", message)
    }

    /// The body.
    pub(crate) fn json(&self) -> Value {
        json!({ "error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.json())).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
