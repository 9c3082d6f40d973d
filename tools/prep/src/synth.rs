//! Models that are made up. Here: a small one whose neurons are known to act in groups: what later stages have to find again.
//!
//! Every byte is a token, and belongs to a few *topics*. A topic is a direction of the residual stream, all orthogonal
//! to each other; a token's embedding is the sum of its topics' directions and of one that all tokens share. In each
//! layer the neurons are cut into groups of equal size, at random; a group's gates look for one topic against the
//! shared direction, so its neurons act in the tokens of that topic and almost not in others. What the layers add is
//! small, so topics last to the end. The same options give the same bytes.
//!
//! Written as a Hugging Face folder (half precision), with `planted.json`: of each layer a list of groups, each a list
//! of neurons. [`like`](mod@like) makes one of seven billion weights.

pub mod folder;
pub mod like;

use crate::error::{PrepError, Result};
use crate::model::roles::{Part, Role};
use folder::{END_OF_TEXT, END_OF_TEXT_ID, WeightsFile, config_json, tokenizer_json, write_json};
use ls_bundle::model::{Architecture, ModelConfig, RopeConfig, RopeScaling, SpecialTokens};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;
use serde_json::json;
use std::path::Path;

/// Shape of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SynthOptions {
    /// Layers.
    pub layers: u16,
    /// Width of the residual stream; a multiple of 32.
    pub hidden: u32,
    /// Neurons of a layer; a multiple of `group`.
    pub neurons: u32,
    /// Neurons of a planted group.
    pub group: u32,
    /// Seed.
    pub seed: u64,
}

impl Default for SynthOptions {
    fn default() -> Self {
        SynthOptions { layers: 3, hidden: 64, neurons: 128, group: 4, seed: 0 }
    }
}

/// Share of the topics that a token belongs to.
const TOPIC_SHARE: f64 = 0.15;
const VOCAB: u32 = END_OF_TEXT_ID + 1;

/// Writes the model into `folder`, which is made, and returns the planted groups: layer, group, neurons.
pub fn synth(folder: &Path, options: &SynthOptions) -> Result<Vec<Vec<Vec<u32>>>> {
    let SynthOptions { layers, hidden, neurons, group, .. } = *options;
    let sound = layers > 0
        && layers <= 512
        && (32..=4096).contains(&hidden)
        && hidden.is_multiple_of(32)
        && (1..=1 << 14).contains(&neurons)
        && group > 0
        && neurons.is_multiple_of(group);
    if !sound {
        return Err(PrepError::usage(format!(
            "no model has this shape: {layers} layers, width {hidden}, {neurons} neurons in groups of {group}"
        )));
    }
    std::fs::create_dir_all(folder).map_err(|source| PrepError::io(folder, source))?;
    let config = config(options);
    let mut planter = Planter::new(options);
    let mut planted = Vec::new();
    let tensors = Role::all(&config);
    let mut file = WeightsFile::create(&folder.join("model.safetensors"), &tensors)?;
    for (role, shape) in &tensors {
        if let Role::Layer(layer, Part::AttnNorm) = role {
            assert_eq!(usize::from(*layer), planted.len(), "a layer begins with this tensor");
            planted.push(planter.plant());
        }
        file.push(&planter.values(*role, shape, planted.last()))?;
    }
    file.finish()?;
    let groups: Vec<Vec<Vec<u32>>> = planted.into_iter().map(|planted| planted.groups).collect();
    write_json(
        folder,
        &[
            ("config.json", &config_json(&config, END_OF_TEXT_ID)),
            ("tokenizer.json", &tokenizer_json(VOCAB)),
            ("tokenizer_config.json", &json!({"eos_token": END_OF_TEXT})),
            ("planted.json", &json!({"options": options, "groups": groups})),
        ],
    )?;
    Ok(groups)
}

fn config(options: &SynthOptions) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        name: "synth".to_owned(),
        vocab_size: VOCAB,
        hidden: options.hidden,
        ffn_hidden: options.neurons,
        layers: options.layers,
        heads: 4,
        kv_heads: 2,
        head_dim: options.hidden / 4,
        norm_epsilon: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::None },
        context_length: 512,
        sliding_window: None,
        tied_head: true,
        qkv_bias: false,
        qk_norm: false,
        special: SpecialTokens::default(),
    }
}

/// One layer's groups and what each looks for.
struct Planted {
    groups: Vec<Vec<u32>>,
    /// Topic of each neuron.
    topics: Vec<usize>,
    /// How strongly each neuron acts; much alike within a group.
    strengths: Vec<f32>,
}

struct Planter {
    options: SynthOptions,
    random: Xoshiro256PlusPlus,
    /// Orthonormal directions; the first is shared by all tokens, the others are topics.
    directions: Vec<Vec<f32>>,
}

impl Planter {
    fn new(options: &SynthOptions) -> Planter {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(options.seed);
        let hidden = options.hidden as usize;
        let mut directions: Vec<Vec<f32>> = Vec::new();
        // A quarter of the space is left to what is no topic.
        while directions.len() < hidden * 3 / 4 {
            let mut new: Vec<f32> = (0..hidden).map(|_| noise(&mut random)).collect();
            for old in &directions {
                let along: f32 = new.iter().zip(old).map(|(a, b)| a * b).sum();
                new.iter_mut().zip(old).for_each(|(a, b)| *a -= along * b);
            }
            let length = new.iter().map(|x| x * x).sum::<f32>().sqrt();
            new.iter_mut().for_each(|x| *x /= length);
            directions.push(new);
        }
        Planter { options: *options, random, directions }
    }

    /// Cuts the next layer's neurons into groups.
    fn plant(&mut self) -> Planted {
        let SynthOptions { neurons, group, .. } = self.options;
        let mut order: Vec<u32> = (0..neurons).collect();
        order.shuffle(&mut self.random);
        let mut groups: Vec<Vec<u32>> = order.chunks(group as usize).map(<[u32]>::to_vec).collect();
        let mut subjects: Vec<usize> = (1..self.directions.len()).collect();
        subjects.shuffle(&mut self.random);
        let mut topics = vec![0; neurons as usize];
        let mut strengths = vec![0.0; neurons as usize];
        for (index, group) in groups.iter_mut().enumerate() {
            group.sort_unstable();
            let strength: f32 = self.random.random_range(0.7..1.3);
            for &neuron in group.iter() {
                topics[neuron as usize] = subjects[index % subjects.len()];
                strengths[neuron as usize] = strength * self.random.random_range(0.97..1.03);
            }
        }
        Planted { groups, topics, strengths }
    }

    fn values(&mut self, role: Role, shape: &[u32], planted: Option<&Planted>) -> Vec<f32> {
        let count = shape.iter().product::<u32>() as usize;
        let hidden = self.options.hidden as usize;
        let Planter { random, directions, .. } = self;
        let layer = || planted.expect("its layer has begun");
        let rows =
            |row: &mut dyn FnMut(usize) -> Vec<f32>| (0..count / hidden).flat_map(row).collect();
        match role {
            Role::Embedding | Role::Head => rows(&mut |_| {
                let mut row: Vec<f32> = directions[0].iter().map(|x| 2.0 * x).collect();
                for direction in &directions[1..] {
                    if random.random_bool(TOPIC_SHARE) {
                        row.iter_mut().zip(direction).for_each(|(x, d)| *x += d);
                    }
                }
                row.iter().map(|x| x + 0.02 * noise(random)).collect()
            }),
            Role::FinalNorm | Role::Layer(_, Part::AttnNorm | Part::MlpNorm) => vec![1.0; count],
            Role::Layer(_, Part::Gate) => rows(&mut |neuron| {
                let direction = directions[layer().topics[neuron]].iter().zip(&directions[0]);
                direction.map(|(d, shared)| 2.0 * d - 0.6 * shared + 0.03 * noise(random)).collect()
            }),
            Role::Layer(_, Part::Up) => rows(&mut |neuron| {
                let strength = layer().strengths[neuron];
                let direction = directions[layer().topics[neuron]].iter();
                direction.map(|d| strength * d + 0.03 * noise(random)).collect()
            }),
            _ => (0..count).map(|_| 0.02 * noise(random)).collect(),
        }
    }
}

/// Mean 0, variance 1, bounded: the sum of twelve uniform numbers.
fn noise(random: &mut Xoshiro256PlusPlus) -> f32 {
    (0..12).map(|_| random.random::<f32>()).sum::<f32>() - 6.0
}
