//! [`Line`]: how far something is, on stderr, for a terminal, once it takes over two seconds; and [`Progress`], the same
//! for what can be counted, with rate and time left.

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

/// What is done of what is to do: bytes, or things that are counted.
#[derive(Debug)]
pub(crate) struct Progress {
    what: &'static str,
    /// What is counted; None: bytes.
    unit: Option<&'static str>,
    total: u64,
    done: u64,
    line: Line,
}

impl Progress {
    /// Starts counting bytes.
    #[must_use]
    pub(crate) fn new(what: &'static str, total: u64) -> Progress {
        Progress { what, unit: None, total, done: 0, line: Line::new() }
    }

    /// Starts counting `unit`s, in the plural.
    #[must_use]
    pub(crate) fn of(what: &'static str, total: u64, unit: &'static str) -> Progress {
        Progress { unit: Some(unit), ..Progress::new(what, total) }
    }

    /// So many more are done.
    pub(crate) fn add(&mut self, more: u64) {
        self.done += more;
        let Progress { what, unit, total, done, .. } = *self;
        let rate = done.max(1) as f64 / self.line.elapsed().as_secs_f64();
        self.line.show(|| {
            let left = total.saturating_sub(done) as f64 / rate;
            let percent = 100.0 * done as f64 / total.max(1) as f64;
            let rate = match unit {
                None => format!("{:.0} MB/s", rate / 1e6),
                Some(unit) => format!("{rate:.1} {unit}/s"),
            };
            format!("{what} {percent:.0} %, {rate}, {left:.0} s left")
        });
    }

    /// Clears the line.
    pub(crate) fn finish(self) {
        self.line.finish();
    }
}
