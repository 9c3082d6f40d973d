//! [`Recipe`]: every hyper-parameter of a preparation, read from TOML.
//!
//! Four recipes are built in ([`NAMES`]); `full.toml` states and explains every key. Another recipe, also a file of
//! the user's, `extends` one of them and says what it changes. Keys that no recipe has are refused, so a misspelt one is
//! never silently the default.

use crate::error::{PrepError, Result};
use crate::key::stage_seed;
use crate::train::Loss;
use ls_bundle::model::{Architecture, DType};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::Path;
use toml::{Table, Value};

/// The built-in recipes.
pub const NAMES: [&str; 4] = ["tiny", "quick", "full", "widened"];
/// Bytes of a recipe file.
pub const MAX_RECIPE_BYTES: u64 = 1 << 20;
/// Recipes that may stand behind each other.
const MAX_DEPTH: usize = 4;

fn built_in(name: &str) -> Option<&'static str> {
    Some(match name {
        "tiny" => include_str!("../recipes/tiny.toml"),
        "quick" => include_str!("../recipes/quick.toml"),
        "full" => include_str!("../recipes/full.toml"),
        "widened" => include_str!("../recipes/widened.toml"),
        _ => return None,
    })
}

/// All hyper-parameters. What each means is told in `recipes/full.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "recipes/full.toml tells what each key means")]
pub struct Recipe {
    pub name: String,
    pub seed: u64,
    pub calibration: Calibration,
    pub activations: Activations,
    pub embedding: Embedding,
    pub placement: Placement,
    pub projection: Projection,
    pub predictor: Predictor,
    pub literal: Predictor,
    pub mlp: Mlp,
    pub base: Base,
    pub reuse: Reuse,
    pub sparsity: Sparsity,
    pub guard: Guard,
    pub lut: Lut,
    pub pack: Pack,
}

macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(missing_docs, reason = "recipes/full.toml tells what each key means")]
        pub struct $name { $(pub $field: $type,)* }
    };
}

section! { /// `[calibration]`.
Calibration { tokens: u64, window: u32, } }
section! { /// `[activations]`.
Activations { chunk_tokens: u32, stages: u32, staged_share: f64, stage_every: u32, check_tokens: u64, } }
section! { /// `[embedding]`.
Embedding { dimensions: u32, epochs: u32, learning_rate: f64, negatives: f64, } }
section! { /// `[projection]`.
Projection { share: f64, whiten: bool, } }
section! { /// `[predictor]`, and `[literal]`, which is the paper's.
Predictor {
    layers: u32, tau: u32, width: u32, stacks: u32, plane_bits: u32, levels: bool, loss: Loss, epochs: u32,
    batch: u32, learning_rate: f64, temperature: [f64; 2], target_share: f64, mixture: Vec<u32>,
    free_signals: bool, moving_average: f64, slow_average: f64, holdout_every: u32,
} }
section! { /// `[mlp]`.
Mlp {
    names: Vec<String>, hidden: u32, wide_hidden: u32, wide_layers: Vec<u32>, tiny_hidden: u32, binary_hidden: u32, epochs: u32,
    batch: u32, learning_rate: f64, binary_learning_rate: f64,
} }
section! { /// `[base]`.
Base {
    gate_bits: u32, up_bits: u32, down_bits: u32, hessian_tokens: u64, exact_shares: Vec<f64>, damping: f64,
    feedback_neurons: u32, sweeps: u32,
} }
section! { /// `[reuse]`.
Reuse {
    method: String, active_share: f64, holdout_every: u32, capacities: Vec<f64>, hot_share: f64,
    recent: u32, means: [f64; 2], levels: [u32; 2], ahead: Vec<f64>, history: u32, gap_intervals: u32,
    clip: f64, layers: u32, tau: u32, width: u32, samples: u32, epochs: u32, batch: u32,
    learning_rate: f64, temperature: [f64; 2], regression_layers: Vec<u32>, extended: bool,
    cache_bias: Vec<f64>,
} }
section! { /// `[sparsity]`.
Sparsity {
    levels: Vec<f64>, bases: Vec<[u32; 3]>, thresholds: bool, uniform: Vec<[u32; 3]>, formats: Vec<Format>,
    eval_tokens: u64,
} }
section! { /// `[guard]`.
Guard {
    quality: f64, tolerances: Vec<f64>, resident: f64, bases: Vec<[u32; 3]>, formats: Vec<Format>,
    block_neurons: Vec<u32>, thresholds: bool, step: f64, eval_tokens: u64, first_tokens: u64, sigmas: f64,
} }
section! { /// `[lut]`.
Lut { intervals: u32, samples: u32, horizon: u32, frequencies: Vec<u8>, significance: f64, } }
section! { /// `[pack]`.
Pack {
    dtype: Format, ffn_dtype: Format, embedding_dtype: Format, rounding_tokens: u64, baseline: bool,
} }

/// A number format of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "DType tells what they are")]
pub enum Format {
    #[serde(rename = "f16")]
    F16,
    #[serde(rename = "q8_0")]
    Q8_0,
    #[serde(rename = "q4_0")]
    Q4_0,
}

impl Format {
    /// As recipes write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Format::F16 => "f16",
            Format::Q8_0 => "q8_0",
            Format::Q4_0 => "q4_0",
        }
    }
}

impl From<Format> for DType {
    fn from(format: Format) -> DType {
        match format {
            Format::F16 => DType::F16,
            Format::Q8_0 => DType::Q8_0,
            Format::Q4_0 => DType::Q4_0,
        }
    }
}

/// `[placement]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "recipes/full.toml tells what each key means")]
pub struct Placement {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_neurons: Option<u32>,
    pub method: String,
    pub active_share: f64,
    pub holdout_every: u32,
    pub cluster_neurons: u32,
}

impl Placement {
    /// Neurons of a block for a model family. The paper groups three for Qwen and two for Llama and Mistral.
    #[must_use]
    pub fn block_neurons(&self, architecture: Architecture) -> u32 {
        self.block_neurons.unwrap_or(match architecture {
            Architecture::Qwen2 | Architecture::Qwen3 => 3,
            Architecture::Llama | Architecture::Mistral => 2,
        })
    }
}

impl Reuse {
    /// Whether the paper's regression is measured in a layer.
    #[must_use]
    pub fn measures_regression(&self, layer: u32) -> bool {
        self.regression_layers.is_empty() || self.regression_layers.contains(&layer)
    }
}

impl Recipe {
    /// A built-in recipe by name, or a file.
    pub fn load(name_or_path: &str) -> Result<Recipe> {
        if let Some(text) = built_in(name_or_path) {
            return Recipe::parse(text, name_or_path);
        }
        let path = Path::new(name_or_path);
        let io = |source| PrepError::io(path, source);
        if !path.exists() {
            let known = NAMES.join(", ");
            let problem = format!("{name_or_path:?} is neither a file nor a recipe ({known})");
            return Err(PrepError::usage(problem));
        }
        let bytes = std::fs::metadata(path).map_err(io)?.len();
        if bytes > MAX_RECIPE_BYTES {
            let problem = format!("{bytes} bytes; the limit is {MAX_RECIPE_BYTES}");
            return Err(PrepError::usage(format!("recipe {name_or_path}: {problem}")));
        }
        Recipe::parse(&std::fs::read_to_string(path).map_err(io)?, name_or_path)
    }

    /// Reads a recipe and those that it extends; `place` is for messages.
    pub fn parse(text: &str, place: &str) -> Result<Recipe> {
        let wrong = |problem: String| PrepError::usage(format!("recipe {place}: {problem}"));
        let table = resolve(text, MAX_DEPTH).map_err(wrong)?;
        let recipe: Recipe = table
            .try_into()
            .map_err(|error: toml::de::Error| wrong(error.to_string().trim().replace('\n', " ")))?;
        recipe.check().map_err(wrong)?;
        Ok(recipe)
    }

    /// The whole recipe as TOML.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a recipe is plain data")
    }

    /// The seed of a stage.
    #[must_use]
    pub fn stage_seed(&self, stage: &str) -> u64 {
        stage_seed(self.seed, stage)
    }

    fn check(&self) -> std::result::Result<(), String> {
        let (calibration, activations) = (&self.calibration, &self.activations);
        let (placement, predictor, base) = (&self.placement, &self.predictor, &self.base);
        let reuse = &self.reuse;
        let counts = [
            ("calibration.tokens", calibration.tokens, u64::from(calibration.window), 1 << 32),
            ("calibration.window", calibration.window.into(), 2, 1 << 17),
            (
                "activations.chunk_tokens",
                activations.chunk_tokens.into(),
                calibration.window.into(),
                1 << 20,
            ),
            ("activations.stages", activations.stages.into(), 1, 64),
            ("activations.stage_every", activations.stage_every.into(), 1, 1 << 20),
            ("placement.block_neurons", placement.block_neurons.unwrap_or(1).into(), 1, 4096),
            ("embedding.dimensions", self.embedding.dimensions.into(), 1, 4096),
            ("embedding.epochs", self.embedding.epochs.into(), 1, 1 << 20),
            ("placement.cluster_neurons", placement.cluster_neurons.into(), 1, 1 << 20),
            ("placement.holdout_every", placement.holdout_every.into(), 2, 1 << 20),
            ("predictor.layers", predictor.layers.into(), 1, 8),
            ("predictor.tau", predictor.tau.into(), 1, 4096),
            ("predictor.stacks", predictor.stacks.into(), 1, 4096),
            ("predictor.holdout_every", predictor.holdout_every.into(), 2, 1 << 20),
            ("reuse.holdout_every", reuse.holdout_every.into(), 2, 1 << 20),
            ("reuse.recent", reuse.recent.into(), 0, 8),
            ("reuse.levels", reuse.levels[0].into(), 1, 64),
            ("reuse.levels", reuse.levels[1].into(), 1, 64),
            ("reuse.history", reuse.history.into(), 1, 8),
            ("reuse.gap_intervals", reuse.gap_intervals.into(), 2, 16),
            ("reuse.layers", reuse.layers.into(), 1, 8),
            ("reuse.tau", reuse.tau.into(), 1, 12),
            ("reuse.samples", reuse.samples.into(), 1, 1 << 24),
            ("base.gate_bits", base.gate_bits.into(), 1, 4),
            ("base.up_bits", base.up_bits.into(), 1, 4),
            ("base.down_bits", base.down_bits.into(), 0, 4),
            ("base.sweeps", base.sweeps.into(), 0, 100),
            ("base.feedback_neurons", base.feedback_neurons.into(), 1, 1 << 14),
            ("pack.rounding_tokens", self.pack.rounding_tokens, 0, 1 << 32),
        ];
        for (name, value, low, high) in counts {
            if !(low..=high).contains(&value) {
                return Err(format!("{name} is {value}; wanted {low} to {high}"));
            }
        }
        let shares = [
            ("activations.staged_share", activations.staged_share),
            ("placement.active_share", placement.active_share),
            ("reuse.active_share", reuse.active_share),
            ("projection.share", self.projection.share),
            ("predictor.target_share", predictor.target_share),
            ("base.damping", base.damping),
        ];
        let sound = |share: &f64| (0.0..=1.0).contains(share);
        if base.exact_shares.is_empty() || !base.exact_shares.iter().all(sound) {
            let found = &base.exact_shares;
            return Err(format!("base.exact_shares is {found:?}; wanted some of 0 to 1"));
        }
        for (name, share) in shares {
            if !(share > 0.0 && share <= 1.0) {
                return Err(format!("{name} is {share}; wanted more than 0, at most 1"));
            }
        }
        self.check_learning()?;
        check_placement(placement)?;
        check_guard(&self.guard)?;
        check_lut(&self.lut)?;
        check_reuse(reuse)
    }

    /// Whether the predictors have what they learn from, and what they are measured on.
    fn check_learning(&self) -> std::result::Result<(), String> {
        let stages = self.activations.stages;
        for (name, predictor) in [("predictor", &self.predictor), ("literal", &self.literal)] {
            if let Some(step) = predictor.mixture.iter().find(|&&step| step > stages) {
                return Err(format!(
                    "{name}.mixture has {step}, and activations.stages are {stages}: wanted 0 to {stages}"
                ));
            }
        }
        let windows = self.calibration.tokens / u64::from(self.calibration.window);
        for (name, every) in [
            ("predictor", self.predictor.holdout_every),
            ("literal", self.literal.holdout_every),
            ("reuse", self.reuse.holdout_every),
        ] {
            if u64::from(every) > windows {
                return Err(format!(
                    "{name}.holdout_every is {every}, and calibration has {windows} windows: none would be held out"
                ));
            }
        }
        Ok(())
    }
}

fn check_guard(guard: &Guard) -> std::result::Result<(), String> {
    let within = |name: &str, numbers: &[f64], low: f64, high: f64| {
        let sound = numbers.iter().all(|number| (low..=high).contains(number));
        let problem = || format!("guard.{name} is {numbers:?}; wanted {low} to {high}");
        if sound { Ok(()) } else { Err(problem()) }
    };
    within("quality", &[guard.quality], 0.0, 10.0)?;
    within("tolerances", &guard.tolerances, 0.0, 10.0)?;
    within("resident", &[guard.resident], 0.0, 1.0)?;
    within("step", &[guard.step], 1e-3, 0.5)?;
    within("sigmas", &[guard.sigmas], 0.0, 10.0)?;
    let bits = guard.bases.iter().flatten().map(|&bits| f64::from(bits)).collect::<Vec<_>>();
    within("bases", &bits, 1.0, 4.0)?;
    let sizes = guard.block_neurons.iter().map(|&size| f64::from(size)).collect::<Vec<_>>();
    within("block_neurons", &sizes, 1.0, 4096.0)?;
    if guard.formats.is_empty() || guard.block_neurons.is_empty() || guard.bases.is_empty() {
        return Err("guard.bases, formats and block_neurons: some of each are wanted".to_owned());
    }
    Ok(())
}

fn check_lut(lut: &Lut) -> std::result::Result<(), String> {
    let Lut { intervals, samples, horizon, frequencies, significance } = lut;
    let known = |frequency: &u8| ls_control::FREQUENCIES.contains(frequency);
    if *intervals as usize != ls_control::STATES {
        return Err(format!("lut.intervals is {intervals}; wanted {}", ls_control::STATES));
    }
    if !(1..=1 << 16).contains(samples) {
        return Err(format!("lut.samples is {samples}; wanted 1 to 65536"));
    }
    if !(1..=1024).contains(horizon) {
        return Err(format!("lut.horizon is {horizon}; wanted 1 to 1024"));
    }
    if frequencies.is_empty() || !frequencies.iter().all(known) {
        let wanted = ls_control::FREQUENCIES;
        return Err(format!("lut.frequencies is {frequencies:?}; wanted some of {wanted:?}"));
    }
    if !(*significance > 0.0 && *significance < 1.0) {
        return Err(format!("lut.significance is {significance}; wanted more than 0, below 1"));
    }
    Ok(())
}

fn check_placement(placement: &Placement) -> std::result::Result<(), String> {
    let methods = ["measured", "file", "random", "frequency", "greedy", "matching", "embedding"];
    if methods.contains(&placement.method.as_str()) {
        return Ok(());
    }
    let wanted = methods.join(", ");
    Err(format!("placement.method is {:?}; wanted one of {wanted}", placement.method))
}

fn check_reuse(reuse: &Reuse) -> std::result::Result<(), String> {
    let methods = ["measured", "reuse distance", "hazard"];
    if !methods.contains(&reuse.method.as_str()) {
        let wanted = methods.join(", ");
        return Err(format!("reuse.method is {:?}; wanted one of {wanted}", reuse.method));
    }
    let intervals = reuse.gap_intervals;
    if !intervals.is_power_of_two() || intervals.trailing_zeros() * reuse.history > 16 {
        let problem = "a power of two, whose bits times the history are at most 16";
        return Err(format!("reuse.gap_intervals is {intervals}; wanted {problem}"));
    }
    let within = |range: Range<f64>| move |number: &f64| range.contains(number);
    let lists: [(&str, &[f64], Range<f64>); 4] = [
        ("reuse.capacities", &reuse.capacities, 0.0..1.0),
        ("reuse.means", &reuse.means, 0.5..1.0),
        ("reuse.ahead", &reuse.ahead, 1e-9..1e9),
        ("reuse.hot_share", &[reuse.hot_share], 0.0..1.0),
    ];
    if !reuse.cache_bias.iter().all(within(0.0..16.0)) {
        return Err(format!("reuse.cache_bias is {:?}; wanted 0 to below 16", reuse.cache_bias));
    }
    for (name, numbers, range) in lists {
        if numbers.is_empty() || !numbers.iter().all(within(range.clone())) {
            let Range { start, end } = range;
            return Err(format!("{name} is {numbers:?}; wanted {start} to below {end}"));
        }
    }
    Ok(())
}

/// The table of `text` laid over that of the recipe it extends.
fn resolve(text: &str, depth: usize) -> std::result::Result<Table, String> {
    let mut table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| error.to_string().trim().replace('\n', " "))?;
    let Some(below) = table.remove("extends") else { return Ok(table) };
    let name = below.as_str().ok_or("extends is not a name")?;
    let below = built_in(name)
        .ok_or_else(|| format!("extends {name:?}, which is none of {}", NAMES.join(", ")))?;
    assert!(depth > 0, "the built-in recipes extend each other without end");
    let mut whole = resolve(below, depth - 1)?;
    overlay(&mut whole, table);
    Ok(whole)
}

fn overlay(below: &mut Table, above: Table) {
    for (key, value) in above {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(above)) => overlay(below, above),
            (_, value) => {
                below.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_recipes_load_under_their_names() {
        for name in NAMES {
            assert_eq!(Recipe::load(name).unwrap().name, name);
        }
    }

    #[test]
    fn the_full_recipe_has_the_papers_defaults() {
        let recipe = Recipe::load("full").unwrap();
        let literal = &recipe.literal;
        assert_eq!((literal.layers, literal.tau, literal.width, literal.stacks), (5, 8, 256, 1));
        assert_eq!((recipe.reuse.layers, recipe.reuse.tau, recipe.reuse.width), (5, 8, 256));
        let lut = &recipe.lut;
        assert_eq!((lut.intervals, lut.samples, lut.horizon), (16, 20, 4));
        assert_eq!(lut.frequencies, [1, 2, 4, 8]);
        assert_eq!(recipe.projection.share, 0.30);
        assert_eq!((recipe.mlp.hidden, recipe.mlp.wide_hidden), (128, 1024));
        assert_eq!(recipe.placement.block_neurons(Architecture::Qwen2), 3);
        assert_eq!(recipe.placement.block_neurons(Architecture::Mistral), 2);
    }

    #[test]
    fn a_recipe_changes_only_what_it_says() {
        let recipe = "extends = \"full\"\n[placement]\nblock_neurons = 1\n";
        let recipe = Recipe::parse(recipe, "mine").unwrap();
        let mut full = Recipe::load("full").unwrap();
        full.placement.block_neurons = Some(1);
        assert_eq!(recipe, full);
        assert_eq!(Recipe::parse(&recipe.to_toml(), "again").unwrap(), recipe);
    }

    #[test]
    fn mistakes_are_named() {
        let cases = [
            ("extends = \"full\"\n[predictor]\ntaw = 8\n", "taw"),
            ("extends = \"full\"\nsede = 8\n", "sede"),
            ("extends = \"full\"\n[activations]\nstages = 4\n", "mixture"),
            ("extends = \"full\"\n[calibration]\ntokens = 2048\n", "holdout_every"),
            ("extends = \"fool\"\n", "fool"),
            ("extends = 3\n", "extends"),
            ("name = \"bare\"\n", "missing field"),
            ("extends = \"full\"\n[predictor]\ntau = 8000\n", "predictor.tau is 8000"),
            ("extends = \"full\"\n[projection]\nshare = 0.0\n", "projection.share is 0"),
            ("extends = \"full\"\n[lut]\nintervals = 8\n", "lut.intervals is 8"),
            ("extends = \"full\"\n[lut]\nsamples = 0\n", "lut.samples is 0"),
            ("extends = \"full\"\n[lut]\nhorizon = 0\n", "lut.horizon is 0"),
            ("extends = \"full\"\n[lut]\nfrequencies = [3]\n", "lut.frequencies is [3]"),
            ("extends = \"full\"\n[lut]\nsignificance = 0.0\n", "lut.significance is 0"),
            ("extends = \"full\"\n[placement]\nmethod = \"magic\"\n", "magic"),
            ("extends = \"full\"\n[predictor]\ntau = \"8\"\n", "tau"),
            ("extends = [", "recipe mine"),
        ];
        for (text, word) in cases {
            let error = Recipe::parse(text, "mine").unwrap_err();
            assert!(error.to_string().contains(word), "no {word:?} in: {error}");
            assert_eq!(error.exit(), crate::exit::Exit::Usage);
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
        }
        assert!(Recipe::load("nothing").unwrap_err().to_string().contains("widened"));
    }
}
