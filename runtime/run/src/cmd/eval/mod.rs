//! `ls-run eval`: quality, of any system, sparsity and budget.
//!
//! - [`perplexity`] of a text; [`mod@divergence`] of a system's distributions from the dense model's, on the same tokens.
//! - [`questions`]: answers to TruthfulQA, Qasper, CoQA or questions of one's own, generated and held against references
//!   ([`score`]), and likelihoods of given answers ([`score::choice`]).
//!
//! Datasets are read by [`data`], put in words by [`prompt`], and what came out is kept by [`journal`], so that a run
//! that was killed goes on with `--resume`. Left out: judge models, which do not fit a device; what stands in for one
//! is called so in the output.
//!
//! # Keys of `--json`
//!
//! Beside those of the plan and the system, which every command has; a mean of items has its standard error as
//! `NAME_stderr` where there are two or more. Shares are between 0 and 1, likelihoods in nats.
//!
//! | keys | of |
//! |---|---|
//! | `task`, `items`, `resumed_items`, `seconds`, `bytes_read`, `peak_rss_bytes` | all but `perplexity`, which has no `task`, `items` |
//! | `perplexity`, `scored_tokens`, `windows`, `window` | `perplexity`, `divergence` |
//! | `by_decode` | all but `divergence`, which always decodes |
//! | `kl_nats`, `kl_max_nats` (mean of the windows' largest), `top1_agreement`, `nll_nats`, `dense_nll_nats`, `dense_perplexity`, `dense_file_bytes` | `divergence` |
//! | `items_of_file`, `left_out_items`, `truncated_items`, `data_hash` (XXH3-64), `chat`, `max_tokens`, `prompt_tokens`, `generated_tokens` | questions |
//! | `f1`, `exact_match` | questions without incorrect answers |
//! | `f1`, `f1_incorrect`, `f1_difference`, `f1_accuracy`, the same with `bleu` | questions with some |
//! | `mc1`, `mc2`, `mc_binary` (where the dataset names the two answers), `mc_is` | questions with some |
//!
//! A line of `--resume` after the first has `item` (its number in the file), `place`, `question`, `correct`,
//! `incorrect`, `prediction`, `rule` (how references count), `correct_generation` (where declining is correct too),
//! `log_likelihoods` (`best`, `correct`, `incorrect`, `best_incorrect`), `scores` and `sums`; a window's has `item`,
//! `scores` and `sums`.

pub(crate) mod data;
pub(crate) mod divergence;
mod journal;
pub(crate) mod perplexity;
mod prompt;
pub(crate) mod questions;
mod score;

use clap::Subcommand;
use data::Format;
use divergence::DivergenceArgs;
use journal::Journal;
use perplexity::PerplexityArgs;
use questions::{QuestionArgs, Task};
use serde_json::json;
use std::path::Path;

/// Measurements of quality.
#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// Perplexity of a text: windows of fixed length, the second half of each scored.
    Perplexity(PerplexityArgs),
    /// How far a system's distributions are from the dense model's on the same tokens (KL divergence).
    Divergence(DivergenceArgs),
    /// Questions that tempt to repeat falsehoods: generated answers and choices, held against TruthfulQA's answers.
    #[command(
        name = "truthfulqa",
        after_help = "Example:\n  ls-run eval truthfulqa model.lsb --data TruthfulQA.csv --limit 100 --resume truthful.jsonl"
    )]
    TruthfulQa(QuestionArgs),
    /// Questions about scientific papers, scored by token F1.
    #[command(
        after_help = "Example:\n  ls-run eval qasper model.lsb --data qasper.jsonl --context 2048 --limit 40"
    )]
    Qasper(QuestionArgs),
    /// Conversations about stories, scored by token F1.
    #[command(
        after_help = "Example:\n  ls-run eval coqa model.lsb --data coqa-dev-v1.0.json --limit 200 --chat"
    )]
    Coqa(QuestionArgs),
    /// Questions of your own, one JSON object a line: question, answers, and if wanted context and incorrect answers.
    #[command(
        after_help = "Example:\n  echo '{\"question\": \"Who?\", \"answers\": [\"Me\"], \"incorrect\": [\"You\"]}' > my.jsonl\n  \
                      ls-run eval qa model.lsb --data my.jsonl"
    )]
    Qa(QuestionArgs),
}

/// A file that `eval` reads, and that others may have written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvalFile {
    /// TruthfulQA's table.
    TruthfulQa,
    /// Qasper's papers.
    Qasper,
    /// CoQA's document.
    Coqa,
    /// Questions of one's own.
    Questions,
    /// Results of a run that is called `{"task": "qa"}`, to go on from.
    Results,
}

/// Reads such a file as `eval` does before it asks a model anything. Of results a torn last line is cut off.
///
/// # Errors
/// Why it is refused.
pub fn check_eval_file(kind: EvalFile, path: &Path) -> Result<(), String> {
    let format = match kind {
        EvalFile::TruthfulQa => Format::TruthfulQa,
        EvalFile::Qasper => Format::Qasper,
        EvalFile::Coqa => Format::Coqa,
        EvalFile::Questions => Format::Plain,
        EvalFile::Results => {
            let journal = Journal::open(Some(path), &json!({"task": "qa"}));
            return journal.map(|journal| drop(journal.totals().means())).map_err(told);
        }
    };
    data::survey(format, path).map(drop).map_err(told)
}

fn told(error: anyhow::Error) -> String {
    format!("{error:#}")
}

/// Runs the command.
pub(crate) fn run(command: &EvalCommand) -> anyhow::Result<()> {
    match command {
        EvalCommand::Perplexity(args) => perplexity::run(args),
        EvalCommand::Divergence(args) => divergence::run(args),
        EvalCommand::TruthfulQa(args) => questions::run(&Task::TRUTHFULQA, args),
        EvalCommand::Qasper(args) => questions::run(&Task::QASPER, args),
        EvalCommand::Coqa(args) => questions::run(&Task::COQA, args),
        EvalCommand::Qa(args) => questions::run(&Task::QA, args),
    }
}
