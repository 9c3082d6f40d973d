//! A progress bar on the terminal, for work that takes longer than a moment.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ls_prep::progress::{Phase, Progress};
use std::time::{Duration, Instant};

/// Work that is over sooner shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);

/// Draws on stderr, and only if that is a terminal.
#[derive(Debug)]
pub(crate) struct TerminalProgress {
    bar: ProgressBar,
    start: Instant,
    shown: bool,
}

impl TerminalProgress {
    pub(crate) fn new() -> Self {
        TerminalProgress { bar: ProgressBar::hidden(), start: Instant::now(), shown: false }
    }
}

impl Progress for TerminalProgress {
    fn begin(&mut self, phase: Phase, total: u64) {
        self.bar.finish_and_clear();
        let (name, unit) = match phase {
            Phase::Hash => ("hashing", "bytes"),
            Phase::Pack => ("packing", "bytes"),
            Phase::Forward => ("forward", "tokens"),
            Phase::Embedding => ("embedding", "layers"),
            Phase::Placement => ("placement", "layers"),
            Phase::Predictor => ("predictor", "layers"),
            Phase::Mlp => ("baselines", "layers"),
            Phase::Base => ("base", "layers"),
            Phase::Comparison => ("comparison", "layers"),
            Phase::Evaluation => ("evaluation", "tokens"),
            Phase::Projection => ("projection", "layers"),
            Phase::Synth => ("writing", "bytes"),
            Phase::Rounding => ("rounding", "layers"),
            Phase::Reuse => ("reuse", "layers"),
        };
        let template = match unit {
            "bytes" => {
                "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}, {eta} left".to_owned()
            }
            unit => {
                format!("{{msg}} [{{bar:30}}] {{pos}}/{{len}} {unit} {{per_sec}}, {{eta}} left")
            }
        };
        let style = ProgressStyle::with_template(&template).expect("the template is well formed");
        let target =
            if self.shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        self.bar = ProgressBar::with_draw_target(Some(total), target);
        self.bar.set_style(style);
        self.bar.set_message(name);
    }

    fn advance(&mut self, count: u64) {
        self.bar.inc(count);
        if !self.shown && self.start.elapsed() > PATIENCE {
            self.shown = true;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }
}

impl Drop for TerminalProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
