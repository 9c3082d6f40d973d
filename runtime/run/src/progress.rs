//! [`Line`]: how far something is, on stderr, for a terminal, once it takes over two seconds; and [`Progress`], the same
//! for bytes, with rate and time left.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// A line that is written anew now and then.
#[derive(Debug)]
pub(crate) struct Line {
    started: Instant,
    shown: Option<Instant>,
}

impl Line {
    /// Something starts.
    #[must_use]
    pub(crate) fn new() -> Line {
        Line { started: Instant::now(), shown: None }
    }

    /// Time since then.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Shows a text if it is time to.
    pub(crate) fn show(&mut self, text: impl FnOnce() -> String) {
        let due = match self.shown {
            None => self.elapsed() > Duration::from_secs(2),
            Some(shown) => shown.elapsed() > Duration::from_millis(200),
        };
        if due && std::io::stderr().is_terminal() {
            eprint!("\r{} \x1b[K", text());
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

/// Bytes done of bytes to do.
#[derive(Debug)]
pub(crate) struct Progress {
    what: &'static str,
    total: u64,
    done: u64,
    line: Line,
}

impl Progress {
    /// Starts counting.
    #[must_use]
    pub(crate) fn new(what: &'static str, total: u64) -> Progress {
        Progress { what, total, done: 0, line: Line::new() }
    }

    /// `bytes` more are done.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.done += bytes;
        let Progress { what, total, done, .. } = *self;
        let rate = done.max(1) as f64 / self.line.elapsed().as_secs_f64();
        self.line.show(|| {
            let left = total.saturating_sub(done) as f64 / rate;
            let percent = 100.0 * done as f64 / total.max(1) as f64;
            format!("{what} {percent:.0} %, {:.0} MB/s, {left:.0} s left", rate / 1e6)
        });
    }

    /// Clears the line.
    pub(crate) fn finish(self) {
        self.line.finish();
    }
}
