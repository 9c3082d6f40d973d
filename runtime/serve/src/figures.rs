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
        let mut page = Exposition::default();
        self.requests(&mut page);
        self.decoding(&mut page);
        page.gauge("kv_cache_tokens", "Tokens in the KV cache.", f64::from(self.position));
        page.gauge("resident_bytes", "Memory that the process holds.", resident_bytes as f64);
        page.gauge("memory_budget_bytes", "Memory that it may hold.", budget_bytes as f64);
        page.text
    }

    fn requests(&self, page: &mut Exposition) {
        let outcomes = [
            ("answered", self.answered as f64),
            ("cancelled", self.cancelled as f64),
            ("late", self.late as f64),
            ("failed", self.failed as f64),
            ("refused", self.refused as f64),
        ];
        page.counters("requests_total", "Requests for answers.", "outcome", &outcomes);
        page.gauge("queue_length", "Requests that wait for their turn.", self.waiting as f64);
        page.gauge("running", "1 while an answer is given.", f64::from(self.running));
        let reused = self.reused_tokens as f64;
        page.counter("reused_tokens_total", "Prompt tokens found in the KV cache.", reused);
    }

    fn decoding(&self, page: &mut Exposition) {
        let stats = &self.stats;
        let tokens =
            [("prefill", stats.prefill_tokens as f64), ("decode", stats.decode_tokens as f64)];
        page.counters("tokens_total", "Tokens computed.", "phase", &tokens);
        let times =
            [("prefill", stats.prefill.as_secs_f64()), ("decode", stats.decode.as_secs_f64())];
        page.counters(
            "seconds_total",
            "Time computing, waits for reads included.",
            "phase",
            &times,
        );
        page.gauge("decode_tokens_per_second", "Speed of the latest decoding.", self.tok_s);
        let stalled = stats.stalled.as_secs_f64();
        page.counter("stalled_seconds_total", "Computation waited for reads.", stalled);
        page.counter("read_bytes_total", "Bytes read from the bundle.", self.bytes_read as f64);
        if let Some(counts) = self.cache {
            let outcomes = [
                ("hit", counts.demand_hits as f64),
                ("prefetched", counts.prefetch_hits as f64),
                ("miss", counts.misses as f64),
            ];
            let help = "Requests for blocks of neurons.";
            page.counters("cache_requests_total", help, "outcome", &outcomes);
            page.gauge("cache_hit_ratio", "Share found in memory.", counts.demand_hit_ratio());
        }
    }
}

/// Text that Prometheus reads: for each metric its help, its type, its values.
#[derive(Default)]
struct Exposition {
    text: String,
}

impl Exposition {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.text, "# HELP leanstream_{name} {help}\n# TYPE leanstream_{name} {kind}")
            .expect("a string takes all text");
    }

    fn value(&mut self, name: &str, value: f64) {
        writeln!(self.text, "leanstream_{name} {value}").expect("a string takes all text");
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, "gauge", help);
        self.value(name, value);
    }

    fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, "counter", help);
        self.value(name, value);
    }

    /// One counter for each value of a label.
    fn counters(&mut self, name: &str, help: &str, label: &str, values: &[(&str, f64)]) {
        self.head(name, "counter", help);
        for (of, value) in values {
            self.value(&format!("{name}{{{label}=\"{of}\"}}"), *value);
        }
    }
}
