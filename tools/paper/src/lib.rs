//! The tables and figures of the paper, measured on this machine: what `ls-prep paper` runs.
//!
//! ```text
//! matrix ──► jobs ──► ledger (results.jsonl) ──► panels ──► panels.json, report.html
//! ```
//!
//! A [`Job`] is a command of `ls-run`, `ls-prep` or a peer, and says which numbers of what it prints are points of which
//! panel. The [`Ledger`] has a line for each job that has ended, so work that was stopped anywhere goes on; a job is known
//! by its command, its inputs and the program that runs it, so nothing stale is shown. [`fill`] makes [`Filled`] panels of
//! the ledger: medians and spreads, never a number without the command that gives it. A panel that cannot be measured
//! here says why.

#![forbid(unsafe_code)]

mod job;
mod ledger;
mod limit;
mod matrix;
mod page;
mod panels;
mod plot;
mod runner;

pub use job::{Feed, Job, Program, Reading, Stamps};
pub use ledger::{Entry, Ledger};
pub use matrix::{Inputs, Model, jobs};
pub use page::page;
pub use panels::{Absent, Filled, PANELS, Panel, fill, filled};
pub use runner::{Machine, Programs, run};

use std::fmt::Display;
use std::path::Path;

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, PaperError>;

/// What stops the measurements. A command that fails does not: it is told in its panel.
#[derive(Debug, thiserror::Error)]
pub enum PaperError {
    /// The operating system refused something.
    #[error("{place}: {source}")]
    Io {
        /// Where.
        place: String,
        /// What it said.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("corrupt: {place}: {problem}")]
    Corrupt {
        /// Which, and where in it.
        place: String,
        /// What is wrong.
        problem: String,
    },
}

impl PaperError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> PaperError {
        PaperError::Io { place: path.display().to_string(), source }
    }

    pub(crate) fn corrupt(place: impl Display, problem: impl Display) -> PaperError {
        PaperError::Corrupt { place: place.to_string(), problem: problem.to_string() }
    }
}
