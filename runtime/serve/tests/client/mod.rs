//! A server on a made-up bundle, and a client that says exactly what a test wants to say.

#[path = "../../../run/tests/sample/mod.rs"]
mod sample;

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A wait that no working server reaches: a failure instead of a hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running server; it ends with the test.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    _folder: TempDir,
}

/// A response, read to its end.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let of =
            |line: &&str| line.split_once(':').is_some_and(|(n, _)| n.eq_ignore_ascii_case(name));
        self.head.lines().find(of).map(|line| line.split_once(':').unwrap().1.trim())
    }

    /// The data of server-sent events.
    pub(crate) fn events(&self) -> Vec<&str> {
        self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect()
    }
}

pub(crate) fn command(folder: &TempDir, flags: &[&str]) -> Command {
    let path = folder.path().join("noise.lsb");
    sample::write(&path);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ls-serve"));
    command.arg(&path).args(["--port", "0", "--memory", "128MiB", "--context", "4000"]).args(flags);
    command
}

impl Server {
    pub(crate) fn start(flags: &[&str]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let mut child = command(&folder, flags).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line = lines.next().expect("the server says where it listens").unwrap();
            if let Some((_, address)) = line.split_once("http://") {
                break address.to_owned();
            }
        };
        Server { child, address, _folder: folder }
    }

    /// Sends bytes as they are.
    pub(crate) fn send(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // A server may answer and close before it has read all.
        let _ = stream.write_all(bytes);
        stream
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Response {
        read(self.send(&text(method, path, headers, body)))
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        self.request("GET", path, "", "")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.request("POST", path, JSON, &body.to_string())
    }

    /// Begins a request and leaves its answer unread.
    pub(crate) fn begin(&self, path: &str, body: &Value) -> TcpStream {
        self.send(&text("POST", path, JSON, &body.to_string()))
    }

    /// A figure of `/metrics`.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("leanstream_{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    /// Asks again and again until a figure is as wanted.
    pub(crate) fn wait_for(&self, name: &str, wanted: impl Fn(f64) -> bool) {
        for _ in 0..6000 {
            if wanted(self.metric(name)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{name} stays {}", self.metric(name));
    }

    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal and waits for the end.
    pub(crate) fn end(mut self, signal: &str) -> Option<i32> {
        let process = self.process().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) const JSON: &str = "Content-Type: application/json\r\n";

pub(crate) fn text(method: &str, path: &str, headers: &str, body: &str) -> Vec<u8> {
    let host = if headers.contains("Host:") { "" } else { "Host: localhost\r\n" };
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\n{host}Connection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Reads a response to its end; the body without its chunks' frames.
pub(crate) fn read(mut stream: TcpStream) -> Response {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let all = String::from_utf8(bytes).unwrap();
    let (head, body) = all.split_once("\r\n\r\n").unwrap_or((&all, ""));
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok());
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Response {
        status: status.unwrap_or_else(|| panic!("no status in {all:?}")),
        head: head.to_owned(),
        body: if chunked { unchunk(body) } else { body.to_owned() },
    }
}

fn unchunk(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        text.push_str(&rest[..size]);
        body = rest[size..].strip_prefix("\r\n").unwrap();
        if size == 0 {
            break;
        }
    }
    text
}
