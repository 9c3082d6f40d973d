//! [`Figures`]: what the decoder has done, for `/metrics` and the page.

use ls_cache::Counts;
use ls_engine::Engine;
use ls_engine::stats::Stats;
use ls_run::answer::Answer;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Weight of the newest answer in averages over answers.
const NEWEST: f64 = 0.3;
/// A rate over recent tokens is taken over at least this time.
const WINDOW: Duration = Duration::from_millis(500);

/// Counters since the start, and the present.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    /// The engine's own counters, as of the last look.
    pub(crate) stats: Stats,
    /// Bytes read from the bundle.
    pub(crate) bytes_read: u64,
    /// Requests for single blocks, where decode is sparse.
    pub(crate) cache: Option<Counts>,
    /// Tokens in the KV cache.
    pub(crate) position: u32,
    /// Tokens that the KV cache can hold.
    pub(crate) context: u32,
    /// Whether an answer is being given.
    pub(crate) running: bool,
    /// Requests that wait.
    pub(crate) waiting: usize,
    /// Answers given to their end.
    pub(crate) answered: u64,
    /// Answers whose client left.
    pub(crate) cancelled: u64,
    /// Answers that took too long.
    pub(crate) late: u64,
    /// Answers that an error of the engine ended.
    pub(crate) failed: u64,
    /// Requests that found the queue full.
    pub(crate) refused: u64,
    /// Tokens of prompts.
    pub(crate) prompt_tokens: u64,
    /// Those of them that the KV cache held already.
    pub(crate) reused_tokens: u64,
    /// Tokens of answers.
    pub(crate) answer_tokens: u64,
    /// Moving average of the time that an answer takes, in seconds.
    pub(crate) answer_s: f64,
    /// Tokens a second in the last stretch of decoding.
    pub(crate) tok_s: f64,
    /// When the stretch of `stretch_tokens` began.
    stretch: Option<Instant>,
    stretch_tokens: u32,
}

impl Figures {
    /// Takes over the engine's counters.
    pub(crate) fn see(&mut self, engine: &Engine) {
        self.stats = engine.stats();
        self.bytes_read = engine.bytes_read();
        self.cache = engine.cache_counts();
        self.position = engine.position();
        self.context = engine.context();
    }

    /// One more token of an answer.
    pub(crate) fn token(&mut self) {
        self.answer_tokens += 1;
        let Some(began) = self.stretch else {
            (self.stretch, self.stretch_tokens) = (Some(Instant::now()), 0);
            return;
        };
        self.stretch_tokens += 1;
        let elapsed = began.elapsed();
        if elapsed >= WINDOW {
            self.tok_s = f64::from(self.stretch_tokens) / elapsed.as_secs_f64();
            (self.stretch, self.stretch_tokens) = (Some(Instant::now()), 0);
        }
    }

    /// An answer came to its end.
    pub(crate) fn answered(&mut self, answer: &Answer, took: Duration) {
        let newest = if self.answered == 0 { 1.0 } else { NEWEST };
        self.answer_s += newest * (took.as_secs_f64() - self.answer_s);
        self.answered += 1;
        self.prompt_tokens += u64::from(answer.prompt_tokens);
        self.reused_tokens += u64::from(answer.reused_tokens);
        if answer.tokens > 1 {
            self.tok_s = answer.tok_s();
        }
        self.stretch = None;
    }

    /// Whole seconds after which it makes sense to ask again.
    pub(crate) fn retry_after_s(&self) -> u64 {
        (self.answer_s.ceil() as u64).clamp(1, 60)
    }

    /// In Prometheus's text format.
    pub(crate) fn prometheus(&self, resident_bytes: u64, budget_bytes: u64) -> String {
        let (stats, mut text) = (&self.stats, String::new());
        let mut metric = |name: &str, kind: &str, help: &str, values: &[(&str, f64)]| {
            let written =
                writeln!(text, "# HELP leanstream_{name} {help}\n# TYPE leanstream_{name} {kind}");
            written.expect("a string takes all text");
            for (labels, value) in values {
                writeln!(text, "leanstream_{name}{labels} {value}")
                    .expect("a string takes all text");
            }
        };
        let seconds = |time: Duration| time.as_secs_f64();
        let requests = [
            ("{outcome=\"answered\"}", self.answered as f64),
            ("{outcome=\"cancelled\"}", self.cancelled as f64),
            ("{outcome=\"late\"}", self.late as f64),
            ("{outcome=\"failed\"}", self.failed as f64),
            ("{outcome=\"refused\"}", self.refused as f64),
        ];
        metric("requests_total", "counter", "Requests for answers by outcome.", &requests);
        let waiting = [("", self.waiting as f64)];
        metric("queue_length", "gauge", "Requests that wait for the one being answered.", &waiting);
        metric("running", "gauge", "1 while an answer is given.", &[("", f64::from(self.running))]);
        let tokens = [
            ("{phase=\"prefill\"}", stats.prefill_tokens as f64),
            ("{phase=\"decode\"}", stats.decode_tokens as f64),
        ];
        metric("tokens_total", "counter", "Tokens computed.", &tokens);
        let times = [
            ("{phase=\"prefill\"}", seconds(stats.prefill)),
            ("{phase=\"decode\"}", seconds(stats.decode)),
        ];
        metric(
            "seconds_total",
            "counter",
            "Time spent computing, waits for reads included.",
            &times,
        );
        let reused = [("", self.reused_tokens as f64)];
        metric("reused_tokens_total", "counter", "Prompt tokens found in the KV cache.", &reused);
        let rate = [("", self.tok_s)];
        metric("decode_tokens_per_second", "gauge", "Speed of the latest decoding.", &rate);
        let stalled = [("", seconds(stats.stalled))];
        metric("stalled_seconds_total", "counter", "Computation waited for reads.", &stalled);
        metric(
            "read_bytes_total",
            "counter",
            "Bytes read from the bundle.",
            &[("", self.bytes_read as f64)],
        );
        if let Some(counts) = self.cache {
            let outcomes = [
                ("{outcome=\"hit\"}", counts.demand_hits as f64),
                ("{outcome=\"prefetched\"}", counts.prefetch_hits as f64),
                ("{outcome=\"miss\"}", counts.misses as f64),
            ];
            metric("cache_requests_total", "counter", "Requests for blocks of neurons.", &outcomes);
            let ratio = [("", counts.demand_hit_ratio())];
            metric("cache_hit_ratio", "gauge", "Share of them found in memory.", &ratio);
        }
        metric(
            "kv_cache_tokens",
            "gauge",
            "Tokens in the KV cache.",
            &[("", f64::from(self.position))],
        );
        metric(
            "resident_bytes",
            "gauge",
            "Memory that the process holds.",
            &[("", resident_bytes as f64)],
        );
        metric(
            "memory_budget_bytes",
            "gauge",
            "Memory that it may hold.",
            &[("", budget_bytes as f64)],
        );
        text
    }
}
