//! Who may ask: clients with the key if there is one; else programs of this machine, and no page of another origin.

use crate::error::ApiError;
use crate::routes::App;
use anyhow::Context;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use ls_run::exit::UsageError;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

/// Shortest key.
const MIN_KEY_BYTES: usize = 8;

/// The first line of a file.
pub(crate) fn read_key(file: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let key = text.lines().next().unwrap_or_default().trim();
    if key.len() < MIN_KEY_BYTES || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        let text = format!(
            "{}: a key is a line of at least {MIN_KEY_BYTES} visible ASCII characters",
            file.display()
        );
        return Err(UsageError(text).into());
    }
    Ok(key.to_owned())
}

/// Before everything but the page and `/health`.
pub(crate) async fn key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(key) = &app.key else { return next.run(request).await };
    let shown = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes);
    let shown = shown.and_then(|value| value.strip_prefix(b"Bearer "));
    if shown.is_some_and(|shown| same(shown, key.as_bytes())) {
        return next.run(request).await;
    }
    let message = "this server wants its API key: Authorization: Bearer KEY";
    let error = ApiError::refused(StatusCode::UNAUTHORIZED, message).code("invalid_api_key");
    let mut response = error.into_response();
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// Before everything, where there is no key: a page elsewhere that had its own name resolved to this machine still
/// sends that name.
pub(crate) async fn host(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    if app.key.is_some() || is_local(request.headers()) {
        return next.run(request).await;
    }
    let message = "without an API key this server answers as localhost only";
    ApiError::refused(StatusCode::FORBIDDEN, message).into_response()
}

fn is_local(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(HOST) else { return true };
    let Ok(host) = host.to_str() else { return false };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Takes the same time wherever they differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_local() {
        let local = |host: &str| {
            is_local(&HeaderMap::from_iter([(HOST, HeaderValue::from_str(host).unwrap())]))
        };
        for host in ["localhost", "LocalHost:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:80", "[::1]"]
        {
            assert!(local(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example", "10.0.0.1:80", "[::2]", "", "::1"] {
            assert!(!local(host), "{host}");
        }
    }

    #[test]
    fn keys_are_the_same_only_if_all_of_them_is() {
        assert!(same(b"secret12", b"secret12"));
        for other in ["", "secret1", "secret13", "Secret12", "secret123"] {
            assert!(!same(other.as_bytes(), b"secret12"), "{other}");
        }
    }
}
