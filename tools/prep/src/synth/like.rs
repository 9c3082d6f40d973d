//! A model with the shape of a well-known one, far too large for memory, whose activations are much like a trained
//! model's: what measures streaming at that size needs shapes, sparsity and locality, not sense.
//!
//! There are *topics*, random directions of the residual stream, some popular and most rare. A token has a few. The
//! first layer and every eighth after it attend to what is near (equal queries and keys, which rotary positions let
//! fade with distance) and add its topics to the token's own, so neighbouring tokens have much in common. A layer's
//! neurons come in groups of [`GROUP`] that look for two topics against a threshold, among noise: what is active is a
//! matter of degree, differs in frequency, and is shared inside a group. A group that acts also brings a topic of its
//! own into the stream, so that what a layer does changes what the next ones look for. Each word of the head is the
//! embedding of another token, so that greedy text does not stand still.
//!
//! Every row is drawn from a seed of its own: strips of rows are made by all processors, the bytes do not depend on how
//! many there are, and only a strip is in memory.

use super::folder::{
    END_OF_TEXT, END_OF_TEXT_ID, WeightsFile, config_json, tokenizer_json, write_json,
};
use crate::error::{PrepError, Result};
use crate::key::stage_seed;
use crate::model::roles::{Part, Role};
use crate::progress::{Phase, Progress};
use crate::room::need_room;
use ls_bundle::model::{Architecture, ModelConfig, RopeConfig, RopeScaling, SpecialTokens};
use rand::seq::SliceRandom;
use rand::{Rng, RngCore, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;
use serde::Serialize;
use serde_json::json;
use std::path::Path;

/// Neurons that act together.
pub const GROUP: usize = 4;
/// Topics of an average token, as a share of all.
const TOPIC_SHARE: f64 = 0.06;
/// Layers from one that attends to what is near to the next.
const NEAR_EVERY: u16 = 8;
/// What such a layer adds of its neighbourhood's residuals.
const NEAR_SHARE: f32 = 0.6;
/// Length of what all tokens have in common, in topics.
const COMMON: f32 = 2.0;
/// Values of a strip.
const STRIP_VALUES: usize = 1 << 22;

/// A model whose shape is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Shape {
    /// Mistral 7B: 8 of 32 heads have keys, a sliding window.
    #[serde(rename = "mistral-7b")]
    Mistral7b,
    /// Llama 2 7B.
    #[serde(rename = "llama2-7b")]
    Llama2x7b,
    /// Qwen 2.5 7B: biases, a large vocabulary.
    #[serde(rename = "qwen2.5-7b")]
    Qwen25x7b,
}

/// What is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LikeOptions {
    /// The model.
    pub shape: Shape,
    /// Layers, if not the model's.
    pub layers: Option<u16>,
    /// Width of the residual stream, if not the model's; heads become fewer in proportion.
    pub hidden: Option<u32>,
    /// Neurons of a layer, if not the model's.
    pub neurons: Option<u32>,
    /// Seed.
    pub seed: u64,
}

/// What making it takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LikeCost {
    /// Numbers, each two bytes.
    pub weights: u64,
    /// Bytes on disk, but for a few megabytes of tokenizer.
    pub bytes: u64,
    /// Seconds on this machine, as far as making the numbers goes.
    pub seconds: f64,
}

impl LikeOptions {
    /// Shape and arithmetic of the model.
    pub fn config(&self) -> Result<ModelConfig> {
        let (architecture, name, vocab_size, hidden, neurons, layers, heads, kv_heads) = match self
            .shape
        {
            Shape::Mistral7b => {
                (Architecture::Mistral, "mistral-7b", 32000, 4096, 14336, 32, 32, 8)
            }
            Shape::Llama2x7b => (Architecture::Llama, "llama2-7b", 32000, 4096, 11008, 32, 32, 32),
            Shape::Qwen25x7b => {
                (Architecture::Qwen2, "qwen2.5-7b", 152_064, 3584, 18944, 28, 28, 4)
            }
        };
        let head_dim = 128;
        let width = self.hidden.unwrap_or(hidden);
        let scaled = |heads: u32| (heads * width / hidden).max(1);
        let mistral = architecture == Architecture::Mistral;
        let qwen = architecture == Architecture::Qwen2;
        let config = ModelConfig {
            architecture,
            name: format!("synth-{name}"),
            vocab_size,
            hidden: width,
            ffn_hidden: self.neurons.unwrap_or(neurons),
            layers: self.layers.unwrap_or(layers),
            heads: scaled(heads),
            kv_heads: scaled(kv_heads),
            head_dim,
            norm_epsilon: if qwen { 1e-6 } else { 1e-5 },
            rope: RopeConfig { theta: if qwen { 1e6 } else { 1e4 }, scaling: RopeScaling::None },
            context_length: if mistral || qwen { 32768 } else { 4096 },
            sliding_window: if mistral { Some(4096) } else { None },
            tied_head: false,
            qkv_bias: qwen,
            qk_norm: false,
            special: SpecialTokens::default(),
        };
        let sound = (1..=512).contains(&config.layers)
            && (head_dim..=1 << 16).contains(&width)
            && width.is_multiple_of(head_dim)
            && (GROUP as u32..=1 << 20).contains(&config.ffn_hidden)
            && config.ffn_hidden.is_multiple_of(GROUP as u32)
            && config.heads.is_multiple_of(config.kv_heads);
        if sound {
            return Ok(config);
        }
        Err(PrepError::usage(format!(
            "no model like {name} has this shape: {} layers, width {width} (a multiple of {head_dim}), {} neurons",
            config.layers, config.ffn_hidden
        )))
    }

    /// What [`like`] will take, from the speed of making a few rows.
    pub fn cost(&self) -> Result<LikeCost> {
        let config = self.config()?;
        let size =
            |(_, shape): &(Role, Vec<u32>)| shape.iter().map(|&d| u64::from(d)).product::<u64>();
        let weights = Role::all(&config).iter().map(size).sum();
        let planter = Planter::new(&config, self.seed);
        let plan = planter.plan(0);
        let rows = (STRIP_VALUES / 4 / config.hidden as usize).clamp(1, config.ffn_hidden as usize);
        let start = std::time::Instant::now();
        planter.strip(Role::Layer(0, Part::Gate), 0, rows, config.hidden as usize, &plan);
        let each = start.elapsed().as_secs_f64() / (rows * config.hidden as usize) as f64;
        Ok(LikeCost { weights, bytes: 2 * weights, seconds: each * weights as f64 })
    }
}

/// Writes the model into `folder`, which is made. Refuses if the disk lacks room.
pub fn like(folder: &Path, options: &LikeOptions, progress: &mut dyn Progress) -> Result<()> {
    let config = options.config()?;
    std::fs::create_dir_all(folder).map_err(|source| PrepError::io(folder, source))?;
    let tensors = Role::all(&config);
    let count = |shape: &[u32]| shape.iter().map(|&dim| u64::from(dim)).product::<u64>();
    let weights: u64 = tensors.iter().map(|(_, shape)| count(shape)).sum();
    need_room(folder, 2 * weights + (64 << 20))?;
    write_json(
        folder,
        &[
            ("config.json", &config_json(&config, END_OF_TEXT_ID)),
            ("tokenizer.json", &tokenizer_json(config.vocab_size)),
            ("tokenizer_config.json", &json!({"eos_token": END_OF_TEXT})),
            ("synth.json", &json!({"options": options})),
        ],
    )?;
    let planter = Planter::new(&config, options.seed);
    let mut file = WeightsFile::create(&folder.join("model.safetensors"), &tensors)?;
    progress.begin(Phase::Synth, 2 * weights);
    let mut plan = planter.plan(0);
    for (role, shape) in &tensors {
        if let Role::Layer(layer, Part::AttnNorm) = role {
            plan = planter.plan(*layer);
        }
        let cols = *shape.last().expect("tensors have shapes") as usize;
        let rows = (count(shape) / cols as u64) as usize;
        let step = (STRIP_VALUES / cols).max(1);
        for first in (0..rows).step_by(step) {
            let values = planter.strip(*role, first, step.min(rows - first), cols, &plan);
            file.push(&values)?;
            progress.advance(2 * values.len() as u64);
        }
    }
    file.finish()
}

/// What a layer's neurons do.
struct Plan {
    neurons: Vec<Neuron>,
    /// kv_width x hidden: the directions that a layer looking near carries; empty for others.
    carried: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Neuron {
    /// Topics it looks for, the second half as much.
    topics: [usize; 2],
    /// The topic that its group brings.
    brings: usize,
    /// Against the common direction.
    threshold: f32,
    /// Of up; either sign.
    strength: f32,
}

struct Planter<'a> {
    config: &'a ModelConfig,
    seed: u64,
    topics: usize,
    /// (1 + topics) x hidden, of length one; the first is common to all tokens.
    directions: Vec<f32>,
    /// hidden x (1 + topics): the same.
    turned: Vec<f32>,
    /// How likely a token has each topic.
    popularity: Vec<f64>,
    /// Length of a residual, about.
    length: f32,
}

impl<'a> Planter<'a> {
    fn new(config: &'a ModelConfig, seed: u64) -> Planter<'a> {
        let hidden = config.hidden as usize;
        let topics = (hidden / 4).clamp(16, 1024);
        let mut planter = Planter {
            config,
            seed,
            topics,
            directions: vec![0.0; (1 + topics) * hidden],
            turned: vec![0.0; (1 + topics) * hidden],
            popularity: Vec::new(),
            length: 0.0,
        };
        let mut random = planter.random("directions", 0, 0);
        for row in planter.directions.chunks_exact_mut(hidden) {
            row.iter_mut().for_each(|x| *x = noise(&mut random));
            let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            row.iter_mut().for_each(|x| *x /= length);
        }
        for (topic, row) in planter.directions.chunks_exact(hidden).enumerate() {
            row.iter().enumerate().for_each(|(i, &x)| planter.turned[i * (1 + topics) + topic] = x);
        }
        let falling = |topic: usize| 1.0 / (1.0 + topic as f64).powf(0.4);
        let mean = (0..topics).map(falling).sum::<f64>() / topics as f64;
        planter.popularity =
            (0..topics).map(|topic| (TOPIC_SHARE * falling(topic) / mean).min(0.5)).collect();
        let mean_topics = planter.popularity.iter().sum::<f64>() as f32;
        planter.length = (COMMON * COMMON + mean_topics * 1.1).sqrt();
        planter
    }

    /// What a row, or a layer's plan, is drawn from.
    fn random(&self, what: &str, layer: u16, row: usize) -> Xoshiro256PlusPlus {
        let seed = stage_seed(self.seed, what) ^ u64::from(layer) << 48;
        Xoshiro256PlusPlus::seed_from_u64(seed.wrapping_add(row as u64))
    }

    fn direction(&self, topic: usize) -> &[f32] {
        let hidden = self.config.hidden as usize;
        &self.directions[(1 + topic) * hidden..][..hidden]
    }

    fn common(&self) -> &[f32] {
        &self.directions[..self.config.hidden as usize]
    }

    fn plan(&self, layer: u16) -> Plan {
        let mut random = self.random("plan", layer, 0);
        let mut order: Vec<usize> = (0..self.config.ffn_hidden as usize).collect();
        order.shuffle(&mut random);
        let blank = Neuron { topics: [0; 2], brings: 0, threshold: 0.0, strength: 0.0 };
        let mut neurons = vec![blank; order.len()];
        for group in order.chunks(GROUP) {
            let topics = [random.random_range(0..self.topics), random.random_range(0..self.topics)];
            let brings = random.random_range(0..self.topics);
            let threshold: f32 = random.random_range(0.05..0.45);
            for &neuron in group {
                let sign = if random.random_bool(0.5) { 1.0 } else { -1.0 };
                let strength = sign * random.random_range(0.7..1.3f32);
                let threshold = threshold + random.random_range(-0.05..0.05f32);
                neurons[neuron] = Neuron { topics, brings, threshold, strength };
            }
        }
        let mut carried = Vec::new();
        if layer.is_multiple_of(NEAR_EVERY) {
            let (hidden, width) = (self.config.hidden as usize, self.config.kv_width() as usize);
            carried = vec![0.0; width * hidden];
            carried.par_chunks_exact_mut(hidden).enumerate().for_each(|(row, values)| {
                let mut random = self.random("carried", layer, row);
                let scale = 1.0 / (width as f32).sqrt();
                values.iter_mut().for_each(|x| *x = scale * noise(&mut random));
            });
        }
        Plan { neurons, carried }
    }

    /// `rows` rows of a tensor from `first` on.
    fn strip(&self, role: Role, first: usize, rows: usize, cols: usize, plan: &Plan) -> Vec<f32> {
        let mut values = vec![0f32; rows * cols];
        values.par_chunks_exact_mut(cols).enumerate().for_each(|(index, values)| {
            self.row(role, first + index, values, plan);
        });
        values
    }

    fn row(&self, role: Role, row: usize, out: &mut [f32], plan: &Plan) {
        let hidden = self.config.hidden as usize;
        let root = (hidden as f32).sqrt();
        let Role::Layer(layer, part) = role else {
            let vocab = self.config.vocab_size as usize;
            match role {
                Role::Embedding => self.embed(row, out),
                // 31 shares no factor with the vocabularies' sizes.
                Role::Head => self.embed((31 * row + 7) % vocab, out),
                _ => out.fill(1.0),
            }
            return;
        };
        let mut random = self.random(&format!("{part:?}"), layer, row);
        let near = !plan.carried.is_empty();
        // A topic's direction, multiplied by this, gives two in the tokens that have it.
        let seen = 2.0 * self.length / root;
        match part {
            Part::AttnNorm | Part::MlpNorm | Part::QueryNorm | Part::KeyNorm => out.fill(1.0),
            Part::QueryBias | Part::KeyBias | Part::ValueBias => out.fill(0.0),
            Part::Query | Part::Key if near => {
                // Equal in all rows: a score is the sum of the cosines of all turns, 8 at its highest.
                let strength = (8.0 / (self.config.head_dim as f32).sqrt()).sqrt();
                let strength = strength * self.length / (COMMON * root);
                out.iter_mut().zip(self.common()).for_each(|(x, d)| *x = strength * d);
            }
            Part::Value if near => out.copy_from_slice(&plan.carried[row * hidden..][..hidden]),
            Part::Output if near => self.carry_back(row, out, plan),
            Part::Query | Part::Key | Part::Value => fill(out, 0.3 / root, &mut random),
            Part::Output => fill(out, 0.05 / root, &mut random),
            Part::Gate => {
                fill(out, 0.8 / root, &mut random);
                let Neuron { topics: [a, b], threshold, .. } = plan.neurons[row];
                add(out, seen, self.direction(a));
                add(out, 0.5 * seen, self.direction(b));
                add(out, -threshold * seen, self.common());
            }
            Part::Up => {
                fill(out, 0.8 / root, &mut random);
                let Neuron { topics: [a, _], strength, .. } = plan.neurons[row];
                add(out, strength * seen, self.direction(a));
            }
            Part::Down => self.down(row, out, plan, &mut random),
        }
    }

    /// An embedding: what is common, and a few topics.
    fn embed(&self, token: usize, out: &mut [f32]) {
        let mut random = self.random("token", 0, token);
        fill(out, 0.01, &mut random);
        add(out, COMMON, self.common());
        for (topic, &popularity) in self.popularity.iter().enumerate() {
            if random.random_bool(popularity) {
                add(out, random.random_range(0.6..1.4), self.direction(topic));
            }
        }
    }

    /// A row of the output of a layer that looks near: the carried directions once more, so that what they carry comes
    /// back. Query heads that share a key head share the work.
    fn carry_back(&self, row: usize, out: &mut [f32], plan: &Plan) {
        let (hidden, head_dim) = (self.config.hidden as usize, self.config.head_dim as usize);
        let group = (self.config.heads / self.config.kv_heads) as usize;
        let scale = NEAR_SHARE * self.length / (hidden as f32).sqrt() / group as f32;
        for (col, x) in out.iter_mut().enumerate() {
            let kv = col / head_dim / group * head_dim + col % head_dim;
            *x = scale * plan.carried[kv * hidden + row];
        }
    }

    /// A row of down: small noise, and of each group the topic that it brings.
    fn down(&self, row: usize, out: &mut [f32], plan: &Plan, random: &mut Xoshiro256PlusPlus) {
        // A fifth of the neurons at about three make a tenth of a residual's length.
        let active = (0.2 * self.config.ffn_hidden as f32 * 9.0).sqrt();
        let root = (self.config.hidden as f32).sqrt();
        fill(out, 0.1 * self.length / (active * root), random);
        let turned = &self.turned[row * (1 + self.topics)..][..1 + self.topics];
        for (x, neuron) in out.iter_mut().zip(&plan.neurons) {
            *x += 0.004 * neuron.strength.signum() * turned[1 + neuron.brings];
        }
    }
}

fn add(out: &mut [f32], factor: f32, direction: &[f32]) {
    out.iter_mut().zip(direction).for_each(|(x, d)| *x += factor * d);
}

fn fill(out: &mut [f32], scale: f32, random: &mut Xoshiro256PlusPlus) {
    out.iter_mut().for_each(|x| *x = scale * noise(random));
}

/// Mean 0, variance 1, bounded: the sum of the four quarters of 64 random bits.
fn noise(random: &mut Xoshiro256PlusPlus) -> f32 {
    const QUARTER: u64 = 0xffff;
    let bits = random.next_u64();
    let sum = (bits & QUARTER) + (bits >> 16 & QUARTER) + (bits >> 32 & QUARTER) + (bits >> 48);
    // Each has mean 32767.5 and variance 65536^2 / 12.
    (sum as f32 - 131_070.0) * (3f32.sqrt() / 65536.0)
}
