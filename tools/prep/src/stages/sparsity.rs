//! `65-sparsity`: the price list. What perplexity a held-out text has when only some neurons run, selected and stood in
//! for in several ways, and what each way keeps resident and streams.
//!
//! An *arm* is one [`Way`] at one sparsity, the share of the neurons that do not run exactly; a unit, with one JSON
//! record ([`Price`]). Arms are independent, so that several machines can share them.

mod learned;

use crate::artifact::{Artifact, Input, RecordId};
use crate::base::Histogram;
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::key::Key;
use crate::model::weights::SourceFile;
use crate::progress::Progress;
use crate::recipe::{self, Format, Recipe};
use crate::sparse::{
    Dense, Oracle, Policy, Selected, Selection, WithBase, likelihoods_in, perplexity,
};
use crate::stage::Stage;
use crate::stages::base::Base;
use crate::stages::mlp::MlpStage;
use crate::stages::predictor::{PredictorStage, Predictors};
use crate::stages::prompts::encode;
use crate::stages::source::Source;
use learned::{From, Learned};
use ls_bundle::model::{DType, QUANT_GROUP};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;
use tokenizers::Tokenizer;

/// How neurons are selected and what becomes of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "way")]
pub enum Way {
    /// All run.
    Dense,
    /// The largest run, the others are dropped. The paper's way, with perfect foresight.
    Oracle,
    /// The hashing predictor of `60-predictor` selects, asked with the layer's own input; the others are dropped.
    Hash,
    /// The two-layer baseline of `62-mlp` selects, asked so too; the others are dropped.
    Mlp,
    /// A low-bit copy of gate and up selects; the others are dropped.
    Sketch {
        /// Of gate and up.
        bits: [u32; 2],
        /// Whether one threshold for all layers selects, and not a count.
        threshold: bool,
    },
    /// All run, in a number format of bundles: plain rounding.
    Rounded {
        /// Of gate, up and down.
        format: Format,
    },
    /// A low-bit copy runs for all: plain quantisation, nothing is streamed.
    Uniform {
        /// Of gate, up and down.
        bits: [u32; 3],
    },
    /// A low-bit copy selects and stands in for the others.
    Base {
        /// Of gate, up and down.
        bits: [u32; 3],
        /// Whether one threshold for all layers selects, and not a count.
        threshold: bool,
    },
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Way::Dense => write!(f, "dense"),
            Way::Oracle => write!(f, "oracle"),
            Way::Hash => write!(f, "hash"),
            Way::Mlp => write!(f, "mlp"),
            Way::Rounded { format } => write!(f, "{}", format.name()),
            Way::Uniform { bits: [gate, up, down] } => write!(f, "uniform {gate}/{up}/{down}"),
            Way::Sketch { bits: [gate, up], threshold } => {
                write!(f, "sketch {gate}/{up}{}", if *threshold { " t" } else { "" })
            }
            Way::Base { bits: [gate, up, down], threshold } => {
                write!(f, "base {gate}/{up}/{down}{}", if *threshold { " t" } else { "" })
            }
        }
    }
}

/// One row of the price list.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Price {
    /// How.
    #[serde(flatten)]
    pub way: Way,
    /// Share of the neurons that are not to run exactly.
    pub sparsity: f64,
    /// Share of the neurons that did; a threshold meets it only about.
    pub exact_share: f64,
    /// Of the held-out text.
    pub perplexity: f64,
    /// Bytes that the way keeps, as a share of the FFNs in half precision.
    pub resident_share: f64,
    /// Bytes of exact neurons that a token needs: in half precision, or in the way's format.
    pub streamed_bytes: u64,
    /// Both, as a share of the FFNs in half precision: what plain quantisation is compared at.
    #[serde(default)]
    pub total_share: f64,
}

/// What the list depends on besides the model, the text and the bases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Params {
    /// Tokens, whole windows.
    pub tokens: u64,
    /// Tokens of a window.
    pub window: u32,
    /// Ways and sparsities.
    pub arms: Vec<(Way, f64)>,
}

/// The stage.
#[derive(Debug)]
pub struct SparsityStage<'a> {
    source: &'a Source,
    bases: &'a [Base],
    learned: Learnt<'a>,
    texts: Vec<Key>,
    tokens: Vec<u32>,
    params: Params,
}

/// Predictors that are priced, where they are there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Learnt<'a> {
    /// Of `60-predictor`, of single neurons.
    pub hash: Option<&'a Predictors>,
    /// Of `62-mlp`, of single neurons.
    pub mlp: Option<&'a Artifact>,
}

impl Learnt<'_> {
    fn inputs(&self) -> impl Iterator<Item = Input> {
        let hash = self.hash.map(|found| (PredictorStage::NAME, found.key));
        let mlp = self.mlp.map(|found| (MlpStage::NAME, found.key()));
        hash.into_iter().chain(mlp).map(|(name, key)| Input { name: name.to_owned(), key })
    }
}

impl<'a> SparsityStage<'a> {
    /// Prices of the model in `source` with each of `bases` and what was learned, over the first tokens of `texts`, as
    /// `recipe` says.
    pub fn new(
        source: &'a Source,
        bases: &'a [Base],
        learned: Learnt<'a>,
        texts: &[PathBuf],
        recipe: &Recipe,
    ) -> Result<SparsityStage<'a>> {
        let window = recipe.calibration.window.min(source.model.config.context_length);
        let texts = texts.iter().map(|path| SourceFile::open(path)).collect::<Result<Vec<_>>>()?;
        let tokens = first_windows(source, &texts, window, recipe.sparsity.eval_tokens)?;
        let key = |text: &SourceFile| Key::parse(&text.hash(&mut |_| ())?.to_hex());
        let texts = texts.iter().map(key).collect::<Result<_>>()?;
        let arms = arms(&recipe.sparsity, bases, learned);
        let params = Params { tokens: tokens.len() as u64, window, arms };
        Ok(SparsityStage { source, bases, learned, texts, tokens, params })
    }

    /// One row of the list.
    fn price(&self, way: Way, sparsity: f64, progress: &mut dyn Progress) -> Result<Price> {
        let config = &self.source.model.config;
        let exact_share = 1.0 - sparsity;
        let base = self.bases.iter().find(|base| ways_of(base).contains(&way));
        let mut policy: Box<dyn Policy + '_> = match (way, base) {
            (Way::Sketch { threshold, .. } | Way::Base { threshold, .. }, Some(base)) => {
                let selection = selection(base, threshold, exact_share)?;
                Box::new(WithBase::new(base, selection))
            }
            (Way::Uniform { .. }, Some(base)) => {
                Box::new(WithBase::new(base, Selection::Share(0.0)))
            }
            (Way::Dense | Way::Rounded { .. }, _) => Box::new(Dense::default()),
            (Way::Hash, _) => {
                let from = From::Hash(self.learned.hash.expect("an arm for what is there"));
                Box::new(Selected::new(Learned::new(from, self.params.window), exact_share))
            }
            (Way::Mlp, _) => {
                let from = From::Mlp(self.learned.mlp.expect("an arm for what is there"), "full");
                Box::new(Selected::new(Learned::new(from, self.params.window), exact_share))
            }
            _ => Box::new(Selected::new(Oracle::new(false), exact_share)),
        };
        let ffn = match way {
            Way::Rounded { format } => Some(DType::from(format)),
            _ => None,
        };
        let (model, tokens, window) = (&self.source.model, &self.tokens, self.params.window);
        let nll = likelihoods_in(model, ffn, tokens, window, &mut *policy, progress)?;
        let layers = u64::from(config.layers);
        let all = layers * u64::from(config.ffn_hidden) * self.params.tokens;
        let exact_share = policy.exact_neurons() as f64 / all as f64;
        let ffn_bytes = layers * u64::from(config.ffn_hidden) * 6 * u64::from(config.hidden);
        // Rows of a format are of whole groups.
        let halves = ffn.map_or(1.0, |dtype| dtype.row_bytes(QUANT_GROUP) as f64 / 64.0);
        let streamed_share = exact_share * halves;
        let resident_share = base.map_or(0.0, Base::resident_share);
        Ok(Price {
            way,
            sparsity,
            perplexity: perplexity(&nll),
            resident_share,
            exact_share,
            streamed_bytes: (ffn_bytes as f64 * streamed_share).round() as u64,
            total_share: resident_share + streamed_share,
        })
    }
}

/// The ways to use a base: one that was fitted with no neuron exact by itself, any other by count and by threshold.
fn ways_of(base: &Base) -> Vec<Way> {
    let way = |threshold| match base.params().bits {
        [gate, up, 0] => Way::Sketch { bits: [gate, up], threshold },
        bits if base.params().exact_shares.iter().all(|&share| share == 0.0) => {
            Way::Uniform { bits }
        }
        bits => Way::Base { bits, threshold },
    };
    let mut ways = vec![way(false), way(true)];
    ways.dedup();
    ways
}

fn selection(base: &Base, threshold: bool, exact_share: f64) -> Result<Selection> {
    if !threshold {
        return Ok(Selection::Share(exact_share));
    }
    let layers = base.artifact().description().units;
    let infos = (0..layers).map(|layer| base.info(layer)).collect::<Result<Vec<_>>>()?;
    let doubts = infos.iter().map(|info| &info.doubts);
    Ok(Selection::Above(Histogram::threshold(doubts, exact_share)))
}

/// Each way at each level at which it says something.
fn arms(recipe: &recipe::Sparsity, bases: &[Base], learned: Learnt<'_>) -> Vec<(Way, f64)> {
    let mut arms = vec![(Way::Dense, 0.0)];
    arms.extend(recipe.formats.iter().map(|&format| (Way::Rounded { format }, 0.0)));
    let sparse = || recipe.levels.iter().copied().filter(|&level| level > 0.0);
    let hash = learned.hash.map(|_| Way::Hash);
    for way in [Way::Oracle].into_iter().chain(hash).chain(learned.mlp.map(|_| Way::Mlp)) {
        arms.extend(sparse().map(|level| (way, level)));
    }
    for way in bases.iter().flat_map(ways_of) {
        match way {
            Way::Sketch { threshold: true, .. } | Way::Base { threshold: true, .. }
                if !recipe.thresholds => {}
            Way::Uniform { .. } => arms.push((way, 1.0)),
            _ => arms.extend(sparse().map(|level| (way, level))),
        }
    }
    arms
}

/// The first `count` tokens of `texts`, rounded down to whole windows, which each start with BOS where the model's
/// prompts do.
pub fn first_windows(
    source: &Source,
    texts: &[SourceFile],
    window: u32,
    count: u64,
) -> Result<Vec<u32>> {
    let tokenizer = Tokenizer::from_bytes(source.model.tokenizer.json.as_bytes())
        .map_err(|problem| PrepError::corrupt("tokenizer", problem))?;
    let special = &source.model.config.special;
    let bos = special.bos.filter(|_| special.add_bos);
    let body = window as usize - usize::from(bos.is_some());
    let mut tokens = Vec::new();
    for text in texts {
        let mut start = 0;
        while tokens.len() as u64 + u64::from(window) <= count {
            let Some((ids, end)) = encode(text, start, body, &tokenizer)? else { break };
            tokens.extend(bos);
            tokens.extend(ids);
            start = end;
        }
    }
    if tokens.is_empty() {
        let problem = format!("the held-out text is shorter than a window of {window} tokens");
        return Err(PrepError::usage(problem));
    }
    Ok(tokens)
}

impl Stage for SparsityStage<'_> {
    const NAME: &'static str = "65-sparsity";
    const SCHEMA: u32 = 2;
    const IN_TENSORS: bool = true;
    type Params = Params;

    fn params(&self) -> Params {
        self.params.clone()
    }

    fn inputs(&self) -> Vec<Input> {
        let base = |base: &Base| Input { name: ways_of(base)[0].to_string(), key: base.key() };
        let text =
            |(index, key): (usize, &Key)| Input { name: format!("text {}", index + 1), key: *key };
        let texts = self.texts.iter().enumerate().map(text);
        std::iter::once(self.source.input())
            .chain(texts)
            .chain(self.bases.iter().map(base))
            .chain(self.learned.inputs())
            .collect()
    }

    fn units(&self) -> u32 {
        self.params.arms.len() as u32
    }

    fn records(&self, arms: Range<u32>) -> u64 {
        arms.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        for arm in journal.description().units_held() {
            let id = RecordId::new(arm, 0);
            if !journal.contains(id) {
                let (way, sparsity) = self.params.arms[arm as usize];
                let price = self.price(way, sparsity, progress)?;
                journal.append(id, &serde_json::to_vec(&price).expect("plain data"))?;
            }
        }
        Ok(())
    }
}

/// The prices in an artifact of [`SparsityStage`].
pub fn prices(artifact: &Artifact) -> Result<Vec<Price>> {
    artifact.check_stage(SparsityStage::NAME)?;
    let price =
        |id| serde_json::from_slice(&artifact.read(id)?).map_err(|problem| artifact.fault(problem));
    artifact.ids().map(price).collect()
}
