//! The server as its clients meet it: answers, errors, and clients that are slow, many, gone or hostile.

mod client;

use client::{JSON, Response, Server, read, text};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn say(words: &str, more: Value) -> Value {
    let mut body = json!({
        "model": "noise", "temperature": 0, "max_tokens": 12,
        "messages": [{ "role": "user", "content": words }],
    });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// An answer that takes longer than any test looks at it.
fn endless() -> Value {
    say("Tell me everything.", json!({ "max_tokens": null, "stream": true }))
}

fn content(response: &Response) -> String {
    assert_eq!(response.status, 200, "{response:?}");
    response.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// The type of an error's status, and that it is shaped as clients expect.
fn error(response: &Response) -> (u16, String) {
    let json = response.json();
    let error = &json["error"];
    assert!(error["type"].is_string() && error.get("code").is_some(), "{json}");
    (response.status, error["message"].as_str().unwrap().to_owned())
}

#[test]
fn a_client_finds_the_model_and_its_answers() {
    let server = Server::start(&[]);
    assert_eq!(server.get("/health").json()["status"], "ok");
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "noise");
    assert_eq!(server.get("/v1/models/noise").json()["object"], "model");
    let whole = server.post(CHAT, &say("Hello?", json!({})));
    let said = content(&whole);
    let whole = whole.json();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    let prompt = whole["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(whole["usage"]["total_tokens"], prompt + 12);
    // The next turn begins with all of this one.
    let turns = json!([
        { "role": "user", "content": "Hello?" }, { "role": "assistant", "content": said },
        { "role": "user", "content": [{ "type": "text", "text": "And?" }] },
    ]);
    let next = server.post(CHAT, &say("", json!({ "messages": turns }))).json();
    let cached = next["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= prompt - 1, "{next}");
    let page = server.get("/");
    assert!(page.body.contains("<!doctype html>") && page.head.contains("text/html"));
    assert!(page.header("content-security-policy").unwrap().contains("default-src 'none'"));
}

#[test]
fn a_streamed_answer_is_the_whole_one_in_pieces() {
    let server = Server::start(&[]);
    let said = content(&server.post(CHAT, &say("Hello?", json!({}))));
    let more = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let streamed = server.post(CHAT, &say("Hello?", more));
    assert!(streamed.header("content-type").unwrap().starts_with("text/event-stream"));
    let events = streamed.events();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(*done, "[DONE]");
    let chunks: Vec<Value> = chunks.iter().map(|c| serde_json::from_str(c).unwrap()).collect();
    assert!(
        chunks.iter().all(|c| c["object"] == "chat.completion.chunk" && c["id"] == chunks[0]["id"])
    );
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let pieces = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str());
    assert_eq!(pieces.collect::<String>(), said);
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(12)));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    let text = json!({ "prompt": "Once", "temperature": 0, "stream": true });
    let streamed = server.post(TEXT, &text);
    let pieces = streamed.events();
    let piece = |data: &&str| serde_json::from_str::<Value>(data).ok();
    let joined: String = pieces
        .iter()
        .filter_map(piece)
        .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    let whole = server.post(TEXT, &json!({ "prompt": "Once", "temperature": 0 })).json();
    assert_eq!(whole["choices"][0]["text"], joined);
    assert_eq!(whole["usage"]["completion_tokens"], 16, "as many as OpenAI gives who does not say");
    let tokens: Vec<u32> = "Once".bytes().map(u32::from).collect();
    let by_tokens = server.post(TEXT, &json!({ "prompt": tokens, "temperature": 0 })).json();
    assert_eq!(by_tokens["choices"], whole["choices"]);
}

#[test]
fn stop_seed_and_temperature_do_what_they_say() {
    let server = Server::start(&[]);
    let whole = content(&server.post(CHAT, &say("Hello?", json!({ "max_tokens": 40 }))));
    let middle: String = whole.chars().skip(15).take(2).collect();
    let cut = server.post(CHAT, &say("Hello?", json!({ "max_tokens": 40, "stop": [middle] })));
    assert_eq!(content(&cut), whole[..whole.find(&middle).unwrap()]);
    assert_eq!(cut.json()["choices"][0]["finish_reason"], "stop");
    let drawn = |seed: Value| {
        let more = json!({ "temperature": 1.5, "seed": seed, "max_completion_tokens": 30 });
        content(&server.post(CHAT, &say("Hello?", more)))
    };
    assert_eq!(drawn(json!(5)), drawn(json!(5)));
    assert_ne!(drawn(json!(5)), drawn(json!(6)));
    assert_ne!(drawn(json!(null)), drawn(json!(null)), "without a seed each answer is another");
}

#[test]
fn wrong_requests_are_told_what_is_wrong() {
    let server = Server::start(&["--max-body", "16KiB"]);
    let long = "long ".repeat(1000);
    let huge = "x".repeat(20_000);
    for (body, status, words) in [
        (say("Hi", json!({ "model": "gpt-4" })), 404, "gpt-4"),
        (say("Hi", json!({ "messages": [] })), 400, "empty"),
        (say("Hi", json!({ "messages": [{ "role": "tool", "content": "x" }] })), 400, "tool"),
        (say("Hi", json!({ "temperature": 9 })), 400, "temperature"),
        (say("Hi", json!({ "n": 3 })), 400, "n is not supported"),
        (say("Hi", json!({ "max_tokens": "many" })), 400, "many"),
        (say(&long, json!({})), 400, "the context holds 4000"),
        (say(&huge, json!({})), 413, "at most 16384 bytes"),
    ] {
        let (found, message) = error(&server.post(CHAT, &body));
        assert_eq!(found, status, "{message}");
        assert!(message.contains(words), "{message}");
    }
    for (prompt, words) in [
        (json!([999_999]), "no token 999999"),
        (json!(["a", "b"]), "one prompt"),
        (json!(""), "empty"),
        (json!(7), "prompt"),
    ] {
        let (status, message) = error(&server.post(TEXT, &json!({ "prompt": prompt })));
        assert_eq!(status, 400, "{message}");
        assert!(message.contains(words) || message.contains("untagged"), "{message}");
    }
    for (method, path, headers, body, status) in [
        ("POST", CHAT, JSON, "{\"messages\": [", 400),
        ("POST", CHAT, JSON, "\u{1F600}", 400),
        ("POST", CHAT, "Content-Type: text/plain\r\n", "{}", 415),
        ("POST", CHAT, "", "{}", 415),
        ("GET", CHAT, "", "", 405),
        ("GET", "/v2/nothing", "", "", 404),
        ("GET", "/v1/models/other", "", "", 404),
    ] {
        let response = server.request(method, path, headers, body);
        assert_eq!(error(&response).0, status, "{method} {path} {body}");
    }
    // No HTTP at all ends the connection, and nothing else.
    let mut rest = Vec::new();
    let _ = server.send(b"\x16\x03\x01 this is no HTTP\r\n\r\n").read_to_end(&mut rest);
    assert!(!content(&server.post(CHAT, &say("Hello?", json!({})))).is_empty());
}

#[test]
fn who_leaves_frees_the_engine_for_others() {
    let server = Server::start(&[]);
    let mut stream = server.begin(CHAT, &endless());
    stream.read_exact(&mut [0; 400]).unwrap();
    assert_eq!(server.metric("running"), 1.0);
    drop(stream);
    server.wait_for("requests_total{outcome=\"cancelled\"}", |count| count == 1.0);
    // One that waits for a whole answer leaves as well.
    let whole = say("Tell me all.", json!({ "max_tokens": null }));
    let stream = server.begin(CHAT, &whole);
    server.wait_for("running", |running| running == 1.0);
    drop(stream);
    server.wait_for("requests_total{outcome=\"cancelled\"}", |count| count == 2.0);
    assert!(server.metric("tokens_total{phase=\"decode\"}") < 7000.0, "neither ran to its end");
    assert_eq!(server.post(CHAT, &say("Hello?", json!({}))).status, 200);
}

#[test]
fn a_full_queue_says_so_at_once_and_when_to_come_again() {
    let server = Server::start(&["--queue", "1"]);
    let running = server.begin(CHAT, &endless());
    server.wait_for("running", |running| running == 1.0);
    let waiting = server.begin(CHAT, &endless());
    server.wait_for("queue_length", |length| length == 1.0);
    let refused = server.post(CHAT, &say("Hello?", json!({})));
    assert_eq!(error(&refused).0, 429);
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    assert!(refused.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    assert_eq!(server.get("/health").status, 200, "and all else is answered");
    // A client that gives up its place in the queue leaves it to the next.
    drop(waiting);
    let next = server.begin(CHAT, &say("Hello?", json!({ "max_tokens": 3 })));
    server.wait_for("queue_length", |length| length == 1.0);
    drop(running);
    assert_eq!(read(next).status, 200);
}

#[test]
fn slow_clients_wait_for_themselves_only() {
    let server = Server::start(&["--client-timeout", "1"]);
    let half_a_head = server.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local");
    let mut request = text("POST", CHAT, JSON, &say("Hello?", json!({})).to_string());
    request.truncate(request.len() - 20);
    let half_a_body = server.send(&request);
    let silent = server.send(b"");
    assert_eq!(server.post(CHAT, &say("Hello?", json!({}))).status, 200);
    assert_eq!(error(&read(half_a_body)).0, 408);
    for mut stream in [half_a_head, silent] {
        let closed = stream.read_to_end(&mut Vec::new());
        let kind = closed.err().map(|error| error.kind());
        assert!(matches!(kind, None | Some(ErrorKind::ConnectionReset)), "{kind:?}: it hangs");
    }
    // One that sends its request byte by byte is served.
    let whole = text("GET", "/health", "", "");
    let mut stream = server.send(b"");
    stream.set_nodelay(true).unwrap();
    for byte in whole {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(read(stream).status, 200);
}

#[test]
fn without_the_key_there_is_only_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "a-secret-key\n").unwrap();
    let server = Server::start(&["--api-key-file", file.to_str().unwrap()]);
    let hello = say("Hello?", json!({})).to_string();
    for (path, headers) in [
        (CHAT, String::new()),
        (CHAT, "Authorization: Bearer a-secret-kez\r\n".into()),
        (CHAT, "Authorization: Basic a-secret-key\r\n".into()),
    ] {
        let response = server.request("POST", path, &format!("{JSON}{headers}"), &hello);
        assert_eq!(error(&response).0, 401, "{headers}");
        assert_eq!(response.header("www-authenticate"), Some("Bearer"));
    }
    for path in ["/v1/models", "/metrics", "/stats"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    for path in ["/", "/health"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    let headers = format!("{JSON}Authorization: Bearer a-secret-key\r\n");
    assert_eq!(server.request("POST", CHAT, &headers, &hello).status, 200);
    let elsewhere = server.request("GET", "/health", "Host: my.host.example\r\n", "");
    assert_eq!(elsewhere.status, 200, "with a key it may have any name");
}

#[test]
fn without_a_key_it_answers_this_machine_only() {
    let folder = tempfile::tempdir().unwrap();
    let out = client::command(&folder, &["--host", "0.0.0.0"]).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("--api-key-file"), "{said}");
    let server = Server::start(&[]);
    let foreign = server.request("GET", "/v1/models", "Host: rebound.example:8080\r\n", "");
    assert_eq!(error(&foreign).0, 403);
    assert_eq!(server.request("GET", "/v1/models", "Host: 127.0.0.1:80\r\n", "").status, 200);
}

#[test]
fn a_signal_ends_it_in_the_middle_of_an_answer() {
    for signal in ["-TERM", "-INT"] {
        let server = Server::start(&[]);
        let mut stream = server.begin(CHAT, &endless());
        stream.read_exact(&mut [0; 400]).unwrap();
        assert_eq!(server.end(signal), Some(0));
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("the server is stopping"), "{rest}");
    }
}

#[test]
fn figures_are_there_for_programs_and_the_page() {
    let server = Server::start(&[]);
    assert_eq!(server.post(CHAT, &say("Hello?", json!({}))).status, 200);
    assert_eq!(server.metric("requests_total{outcome=\"answered\"}"), 1.0);
    assert_eq!(
        server.metric("tokens_total{phase=\"decode\"}"),
        11.0,
        "the first comes from the prompt"
    );
    for name in ["read_bytes_total", "resident_bytes", "memory_budget_bytes", "kv_cache_tokens"] {
        assert!(server.metric(name) > 0.0, "{name}");
    }
    let stats = server.get("/stats").json();
    assert_eq!(stats["plan"]["context"], 4000);
    assert_eq!((&stats["model"], &stats["can_chat"]), (&json!("noise"), &json!(true)));
}

/// Bytes that a process holds.
fn resident_bytes(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// `clients` threads send `requests` requests, and come again when told to. Returns how often that was.
fn storm(server: &Server, clients: usize, requests: usize) -> usize {
    let (next, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let ask = |index: usize| {
        let more = json!({ "stream": index.is_multiple_of(2), "max_tokens": 1 + index % 7 });
        let body = say(&format!("Question {}?", index % 50), more);
        loop {
            let response = server.post(CHAT, &body);
            match response.status {
                200 if index.is_multiple_of(2) => {
                    return assert!(response.body.ends_with("data: [DONE]\n\n"));
                }
                200 => {
                    let tokens = response.json()["usage"]["completion_tokens"].as_u64().unwrap();
                    return assert_eq!(tokens as usize, 1 + index % 7);
                }
                429 => {
                    refused.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
                _ => panic!("{response:?}"),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..clients {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= requests {
                        return;
                    }
                    ask(index);
                }
            });
        }
    });
    refused.into_inner()
}

#[test]
fn a_thousand_requests_lose_none_and_leave_nothing() {
    let server = Server::start(&["--queue", "2"]);
    storm(&server, 8, 100);
    let before = resident_bytes(server.process());
    let refused = storm(&server, 8, 1000);
    let after = resident_bytes(server.process());
    assert_eq!(server.metric("requests_total{outcome=\"answered\"}"), 1100.0);
    assert!(refused > 0, "the queue was full at times");
    for outcome in ["cancelled", "late", "failed"] {
        assert_eq!(server.metric(&format!("requests_total{{outcome=\"{outcome}\"}}")), 0.0);
    }
    eprintln!("1000 requests, {refused} told to come again; {before} bytes before, {after} after");
    assert!(after < before + (1 << 20), "{before} bytes before, {after} after");
}
