//! [`Chain`]: the stages of one preparation in order, each knowing the ones before it.

use crate::error::Result;
use crate::key::Key;
use crate::progress::Progress;
use crate::recipe::Recipe;
use crate::stage::{Stage, State};
use crate::stages::activations::{Activations, ActivationsStage};
use crate::stages::placement::PlacementStage;
use crate::stages::prompts::{Prompts, Windows};
use crate::stages::source::{self, Source};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A model, a recipe and calibration text: what everything else follows from.
#[derive(Debug)]
pub struct Chain {
    /// The model and its artifacts.
    pub source: Source,
    /// The hyper-parameters.
    pub recipe: Recipe,
    texts: Vec<PathBuf>,
}

/// How far one stage has come.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Number and name of the stage.
    pub stage: &'static str,
    /// Its key, where the stages before it tell.
    pub key: Option<Key>,
    /// How far it is.
    #[serde(flatten)]
    pub state: State,
}

impl Chain {
    /// Opens the model at `model`; artifacts lie inside `artifacts`.
    pub fn open(
        model: &Path,
        artifacts: &Path,
        recipe: Recipe,
        texts: Vec<PathBuf>,
        progress: &mut dyn Progress,
    ) -> Result<Chain> {
        Ok(Chain { source: Source::open(model, artifacts, progress)?, recipe, texts })
    }

    /// `15-prompts`.
    pub fn prompts(&self) -> Result<Prompts<'_>> {
        Prompts::new(&self.source, &self.texts, &self.recipe)
    }

    /// The calibration windows, made if they are not there, and their artifact's key.
    pub fn windows(&self, progress: &mut dyn Progress) -> Result<(Windows, Key)> {
        let (artifact, _) = self.source.store.run(&self.prompts()?, None, progress)?;
        Ok((Windows::read(&artifact, self.source.model.config.vocab_size)?, artifact.key()))
    }

    /// `20-activations` of these windows.
    #[must_use]
    pub fn activations<'a>(&'a self, windows: &'a Windows, prompts: Key) -> ActivationsStage<'a> {
        ActivationsStage::new(&self.source, windows, prompts, &self.recipe)
    }

    /// `40-placement` after these activations.
    #[must_use]
    pub fn placement<'a>(&self, activations: &'a Activations) -> PlacementStage<'a> {
        let architecture = self.source.model.config.architecture;
        PlacementStage::new(activations, architecture, &self.recipe)
    }

    /// All stages in order. Makes nothing.
    pub fn links(&self) -> Result<Vec<Link>> {
        let store = &self.source.store;
        let bytes = |path: &PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        let bytes = self.source.model.files.iter().map(bytes).sum();
        let state = State::Done { bytes };
        let mut links = vec![Link { stage: source::NAME, key: Some(self.source.key), state }];
        let prompts = if self.texts.is_empty() { None } else { Some(self.prompts()?) };
        let mut windows = None;
        links.push(match prompts {
            Some(stage) => {
                if let Ok(Some(artifact)) = store.find(&stage) {
                    let vocab_size = self.source.model.config.vocab_size;
                    windows =
                        Windows::read(&artifact, vocab_size).ok().map(|w| (w, artifact.key()));
                }
                Link { stage: Prompts::NAME, key: Some(stage.key()), state: store.state(&stage)? }
            }
            None => self.unknown(Prompts::NAME)?,
        });
        let mut activations = None;
        links.push(match &windows {
            Some((windows, key)) => {
                let stage = self.activations(windows, *key);
                if let Ok(Some(artifact)) = store.find(&stage) {
                    activations = Some(Activations::new(artifact)?);
                }
                let (key, state) = (Some(stage.key()), store.state(&stage)?);
                Link { stage: ActivationsStage::NAME, key, state }
            }
            None => self.unknown(ActivationsStage::NAME)?,
        });
        links.push(match &activations {
            Some(activations) => {
                let stage = self.placement(activations);
                let (key, state) = (Some(stage.key()), store.state(&stage)?);
                Link { stage: PlacementStage::NAME, key, state }
            }
            None => self.unknown(PlacementStage::NAME)?,
        });
        Ok(links)
    }

    /// A stage whose key hangs on one that is not there.
    fn unknown(&self, stage: &'static str) -> Result<Link> {
        Ok(Link { stage, key: None, state: self.source.store.state_without_key(stage)? })
    }
}
