//! [`Progress`]: a line on stderr with rate and time left, for a terminal, once something takes over two seconds.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Bytes done of bytes to do.
#[derive(Debug)]
pub(crate) struct Progress {
    what: &'static str,
    total: u64,
    done: u64,
    started: Instant,
    shown: Option<Instant>,
}

impl Progress {
    /// Starts counting.
    #[must_use]
    pub(crate) fn new(what: &'static str, total: u64) -> Progress {
        Progress { what, total, done: 0, started: Instant::now(), shown: None }
    }

    /// `bytes` more are done.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.done += bytes;
        let elapsed = self.started.elapsed();
        let due = self
            .shown
            .map_or(elapsed > Duration::from_secs(2), |t| t.elapsed() > Duration::from_millis(200));
        if due && self.done > 0 && std::io::stderr().is_terminal() {
            let rate = self.done as f64 / elapsed.as_secs_f64();
            let left = self.total.saturating_sub(self.done) as f64 / rate;
            let percent = 100.0 * self.done as f64 / self.total.max(1) as f64;
            eprint!(
                "\r{} {percent:.0} %, {:.0} MB/s, {left:.0} s left \x1b[K",
                self.what,
                rate / 1e6
            );
            self.shown = Some(Instant::now());
        }
    }

    /// Clears the line.
    pub(crate) fn finish(self) {
        if self.shown.is_some() {
            eprint!("\r\x1b[K");
            // A terminal that went away is no reason to fail.
            let _ = std::io::stderr().flush();
        }
    }
}
