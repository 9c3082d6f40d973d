//! [`EngineError`]: what can go wrong between opening a bundle and the last token.

use crate::memory::BudgetTooSmall;
use ls_bundle::Bundle;
use ls_bundle::blocks::Block;
use ls_bundle::ids::LayerId;
use ls_bundle::tables::TableKind;

/// Why the engine stopped. Opaque: callers print it, or ask for its [`kind`](EngineError::kind).
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct EngineError(#[from] Inner);

#[derive(Debug, thiserror::Error)]
enum Inner {
    #[error("{0}")]
    Io(ls_io::IoError),
    #[error("cannot read {blocks}: {error}")]
    Blocks { blocks: String, error: ls_io::IoError },
    #[error("{0}")]
    Memory(ls_sync::AllocateError),
    #[error(transparent)]
    Budget(BudgetTooSmall),
    #[error("{0}")]
    Bundle(ls_bundle::BundleError),
    #[error(
        "the prompt has {prompt} tokens, the context holds {context}; raise --context or shorten the prompt"
    )]
    ContextFull { prompt: u64, context: u32 },
    #[error("the prompt is empty; this model has no beginning-of-sequence token to start from")]
    EmptyPrompt,
    #[error(
        "this system needs a bundle with a table of kind {0}: prepare the model with `ls-prep all`, or choose another \
         --system"
    )]
    MissingTable(TableKind),
    #[error("the {kind} table of layer {layer}: {problem}")]
    BadTable { layer: LayerId, kind: TableKind, problem: String },
    #[error("nobody says which neurons run: choose a --predictor or a --refiner, or --sparsity 0%")]
    NobodyChooses,
    #[error("a system that knows the future needs a recording of it")]
    NoRecording,
    #[error("the bundle's tokenizer cannot be used: {0}")]
    Tokenizer(String),
}

/// Kinds of [`EngineError`], for exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineErrorKind {
    /// A read failed.
    Io,
    /// The operating system refused memory that the plan allows.
    Memory,
    /// No plan fits the budget.
    Budget,
    /// The request does not fit the context, or is empty.
    Request,
    /// The bundle is unusable.
    Corrupt,
}

impl EngineError {
    pub(crate) fn io(error: ls_io::IoError) -> EngineError {
        Inner::Io(error).into()
    }

    pub(crate) fn memory(error: ls_sync::AllocateError) -> EngineError {
        Inner::Memory(error).into()
    }

    pub(crate) fn bundle(error: ls_bundle::BundleError) -> EngineError {
        Inner::Bundle(error).into()
    }

    pub(crate) fn context_full(prompt: u64, context: u32) -> EngineError {
        Inner::ContextFull { prompt, context }.into()
    }

    pub(crate) fn empty_prompt() -> EngineError {
        Inner::EmptyPrompt.into()
    }

    pub(crate) fn missing_table(kind: TableKind) -> EngineError {
        Inner::MissingTable(kind).into()
    }

    pub(crate) fn bad_table(
        layer: LayerId,
        kind: TableKind,
        problem: impl std::fmt::Display,
    ) -> EngineError {
        Inner::BadTable { layer, kind, problem: problem.to_string() }.into()
    }

    pub(crate) fn nobody_chooses() -> EngineError {
        Inner::NobodyChooses.into()
    }

    pub(crate) fn no_recording() -> EngineError {
        Inner::NoRecording.into()
    }

    pub(crate) fn tokenizer(error: impl std::fmt::Display) -> EngineError {
        Inner::Tokenizer(error.to_string()).into()
    }

    /// The same, but that a failed read is told by the blocks that it was for.
    pub(crate) fn naming(self, bundle: &Bundle) -> EngineError {
        let Inner::Io(error) = self.0 else { return self };
        let Some((offset, len)) = error.range() else { return Inner::Io(error).into() };
        let end = offset + len as u64;
        let meant = |block: &Block| block.extent.end() > offset && block.extent.offset < end;
        let mut blocks = bundle.blocks().filter(meant);
        let inner = match (blocks.next(), blocks.last()) {
            (Some(first), Some(last)) => {
                Inner::Blocks { blocks: format!("{} to {}", first.name, last.name), error }
            }
            (Some(only), None) => Inner::Blocks { blocks: only.name.to_string(), error },
            _ => Inner::Io(error),
        };
        inner.into()
    }

    /// What kind of failure this is.
    #[must_use]
    pub fn kind(&self) -> EngineErrorKind {
        match &self.0 {
            Inner::Io(_) | Inner::Blocks { .. } => EngineErrorKind::Io,
            Inner::Memory(_) => EngineErrorKind::Memory,
            Inner::Budget(_) => EngineErrorKind::Budget,
            Inner::ContextFull { .. }
            | Inner::EmptyPrompt
            | Inner::MissingTable(_)
            | Inner::NobodyChooses
            | Inner::NoRecording => EngineErrorKind::Request,
            Inner::Bundle(_) | Inner::Tokenizer(_) | Inner::BadTable { .. } => {
                EngineErrorKind::Corrupt
            }
        }
    }
}

impl From<BudgetTooSmall> for EngineError {
    fn from(error: BudgetTooSmall) -> EngineError {
        Inner::Budget(error).into()
    }
}
