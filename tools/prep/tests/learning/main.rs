//! The stages that learn, on a small model with planted groups and on the zoo.

#![forbid(unsafe_code)]

mod activations;
mod base;
mod chain;
mod cli;
mod datasets;
mod forward;
mod guard;
mod pack;
mod placement;
mod predictor;
#[cfg(feature = "lapack")]
mod projection;
mod prompts;
mod reuse;
mod rounding;
mod synth;

use ls_prep::recipe::Recipe;
use ls_prep::stages::source::Source;
use ls_prep::synth::{SynthOptions, synth};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// English text of the repository.
fn text() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../datasets/tiny/lighthouse.txt")
}

fn tiny() -> Recipe {
    Recipe::load("tiny").unwrap()
}

/// A synthetic model in a folder of its own, and a folder for artifacts.
struct Bench {
    dir: TempDir,
    groups: Vec<Vec<Vec<u32>>>,
}

impl Bench {
    fn new() -> Bench {
        let dir = TempDir::new().unwrap();
        let groups = synth(&dir.path().join("synth"), &SynthOptions::default()).unwrap();
        Bench { dir, groups }
    }

    fn model(&self) -> PathBuf {
        self.dir.path().join("synth")
    }

    fn source(&self) -> Source {
        self.source_in("artifacts")
    }

    fn source_in(&self, artifacts: &str) -> Source {
        Source::open(&self.model(), &self.dir.path().join(artifacts), &mut ()).unwrap()
    }
}
