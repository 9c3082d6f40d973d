//! The model in plain f32 with f64 sums: the definition that every backend is compared with.
//!
//! One token at a time, every weight in memory as f32, no threads, no tricks. [`ReferenceModel::forward`] reads from
//! top to bottom like the architecture's description: RMSNorm, q k v, rotation, attention, SwiGLU, head.
//! [`ReferenceBase`] is the FFN of which only some neurons run exactly.

mod base;
pub use base::ReferenceBase;

use crate::dequantize::dequantize_row;
use crate::rope::{rope_frequencies, rope_turn};
use half::f16;
use ls_bundle::extent::Extent;
use ls_bundle::model::{LayerVectors, MatrixExtent, ModelConfig, Vectors, WeightMap};

/// Matrices of one layer, row-major.
#[derive(Clone, Debug, Default)]
pub struct LayerWeights {
    /// query_width x hidden.
    pub q: Vec<f32>,
    /// kv_width x hidden.
    pub k: Vec<f32>,
    /// kv_width x hidden.
    pub v: Vec<f32>,
    /// hidden x query_width.
    pub o: Vec<f32>,
    /// ffn_hidden x hidden; row i is neuron i's gate.
    pub gate: Vec<f32>,
    /// ffn_hidden x hidden; row i is neuron i's up.
    pub up: Vec<f32>,
    /// ffn_hidden x hidden; row i is neuron i's column of the down matrix.
    pub down: Vec<f32>,
}

impl LayerWeights {
    /// The FFN, Eq. 1: SiLU(gate . h) * (up . h) * down, summed over the neurons that `chosen` accepts; hidden.
    #[must_use]
    pub fn ffn(&self, h: &[f32], chosen: impl Fn(usize) -> bool) -> Vec<f64> {
        let (gate, up) = (matvec(&self.gate, h), matvec(&self.up, h));
        let mut sum = vec![0f64; h.len()];
        for (neuron, down) in self.down.chunks_exact(h.len()).enumerate() {
            if chosen(neuron) {
                let (gate, up) = (gate[neuron], up[neuron]);
                let activation = f64::from(gate / (1.0 + (-gate).exp()) * up);
                sum.iter_mut().zip(down).for_each(|(s, &d)| *s += activation * f64::from(d));
            }
        }
        sum
    }

    /// What each neuron adds: |SiLU(gate . h) * (up . h)| * ||down||; ffn.
    #[must_use]
    pub fn importance(&self, h: &[f32]) -> Vec<f64> {
        let (gate, up) = (matvec(&self.gate, h), matvec(&self.up, h));
        let activations = gate.iter().zip(&up).map(|(g, u)| f64::from(g / (1.0 + (-g).exp()) * u));
        let downs = self.down.chunks_exact(h.len()).map(|down| dot(down, down).sqrt());
        activations.zip(downs).map(|(activation, down)| activation.abs() * down).collect()
    }
}

/// All matrices of a model.
#[derive(Clone, Debug, Default)]
pub struct ReferenceWeights {
    /// One entry a layer.
    pub layers: Vec<LayerWeights>,
    /// vocab_size x hidden; the embedding when absent.
    pub head: Option<Vec<f32>>,
    /// vocab_size x hidden.
    pub embedding: Vec<f32>,
}

impl ReferenceWeights {
    /// Dequantises everything that `map` names; `read` gives the bytes of a range of the bundle.
    pub fn read<E>(
        map: &WeightMap,
        mut read: impl FnMut(Extent) -> Result<Vec<u8>, E>,
    ) -> Result<Self, E> {
        let mut matrix = |extent: &MatrixExtent| -> Result<Vec<f32>, E> {
            let bytes = read(extent.rows_extent(0, extent.rows))?;
            let mut out = vec![0.0; extent.rows as usize * extent.cols as usize];
            let rows = out.chunks_exact_mut(extent.cols as usize);
            for (row, bytes) in rows.zip(bytes.chunks_exact(extent.row_bytes() as usize)) {
                dequantize_row(extent.dtype, bytes, row);
            }
            Ok(out)
        };
        let mut layers = Vec::with_capacity(map.layers.len());
        for extents in &map.layers {
            layers.push(LayerWeights {
                q: matrix(&extents.q_proj)?,
                k: matrix(&extents.k_proj)?,
                v: matrix(&extents.v_proj)?,
                o: matrix(&extents.o_proj)?,
                ..LayerWeights::default()
            });
        }
        let head = map.head.as_ref().map(&mut matrix).transpose()?;
        let embedding = matrix(&map.embedding)?;
        for (layer, extents) in layers.iter_mut().zip(&map.layers) {
            let ffn = &extents.ffn;
            let bytes = read(ffn.extent())?;
            let mut row = vec![0.0; ffn.hidden as usize];
            for neuron in 0..ffn.neurons {
                let start = u64::from(neuron / ffn.block_neurons) * ffn.block_stride()
                    + u64::from(neuron % ffn.block_neurons) * ffn.neuron_bytes();
                let row_bytes = ffn.dtype.row_bytes(ffn.hidden) as usize;
                let mut rows = bytes[start as usize..].chunks_exact(row_bytes);
                for matrix in [&mut layer.gate, &mut layer.up, &mut layer.down] {
                    let bytes = rows.next().expect("a neuron has three rows");
                    dequantize_row(ffn.dtype, bytes, &mut row);
                    matrix.extend_from_slice(&row);
                }
            }
        }
        Ok(ReferenceWeights { layers, head, embedding })
    }
}

/// A model ready to run.
#[derive(Clone, Debug)]
pub struct ReferenceModel {
    config: ModelConfig,
    vectors: Vectors,
    weights: ReferenceWeights,
    frequencies: Vec<f32>,
}

/// Keys and values of the tokens so far: for each layer position x kv_width, keys already rotated.
#[derive(Clone, Debug)]
pub struct ReferenceState {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    /// What the cache makes of a number.
    stored: fn(f32) -> f32,
}

impl ReferenceState {
    /// No tokens yet.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        let empty = vec![Vec::new(); usize::from(config.layers)];
        ReferenceState { keys: empty.clone(), values: empty, stored: |x| x }
    }

    /// The same, with keys and values rounded to f16, as backends keep them.
    #[must_use]
    pub fn with_f16_cache(config: &ModelConfig) -> Self {
        let stored = |x| f16::from_f32(x).to_f32();
        ReferenceState { stored, ..ReferenceState::new(config) }
    }
}

impl ReferenceModel {
    /// Panics later, in `forward`, if the weights do not have the shapes that `config` says.
    #[must_use]
    pub fn new(config: ModelConfig, vectors: Vectors, weights: ReferenceWeights) -> Self {
        let frequencies = rope_frequencies(&config.rope, config.head_dim);
        ReferenceModel { config, vectors, weights, frequencies }
    }

    /// Logits (vocab_size) after `token` at `position`. The state then holds positions `0 ..= position`; what it
    /// held behind is dropped. Panics if it does not hold the positions before.
    #[must_use]
    pub fn forward(&self, state: &mut ReferenceState, token: u32, position: u32) -> Vec<f32> {
        self.forward_with(state, token, position, |_, weights, h| weights.ffn(h, |_| true))
    }

    /// The same with another FFN: `ffn(layer, its weights, its input)` is added to the residual.
    pub fn forward_with(
        &self,
        state: &mut ReferenceState,
        token: u32,
        position: u32,
        mut ffn: impl FnMut(usize, &LayerWeights, &[f32]) -> Vec<f64>,
    ) -> Vec<f32> {
        let config = &self.config;
        let hidden = config.hidden as usize;
        let mut x = self.weights.embedding[token as usize * hidden..][..hidden].to_vec();
        for (layer, weights) in self.weights.layers.iter().enumerate() {
            let vectors = &self.vectors.layers[layer];
            // Attention.
            let h = self.rms_norm(&x, &vectors.attn_norm);
            let (q, k, v) = self.project(weights, vectors, &h, position);
            let (keys, values) = (&mut state.keys[layer], &mut state.values[layer]);
            for (cache, row) in [(&mut *keys, k), (&mut *values, v)] {
                let held = position as usize * row.len();
                assert!(cache.len() >= held, "position {position} follows none");
                cache.truncate(held);
                cache.extend(row.into_iter().map(state.stored));
            }
            let attended = self.attend(&q, keys, values);
            add(&mut x, &matvec(&weights.o, &attended));
            let h = self.rms_norm(&x, &vectors.mlp_norm);
            let sum = ffn(layer, weights, &h);
            add(&mut x, &sum.iter().map(|&s| s as f32).collect::<Vec<_>>());
        }
        let h = self.rms_norm(&x, &self.vectors.final_norm);
        matvec(self.weights.head.as_ref().unwrap_or(&self.weights.embedding), &h)
    }

    /// q (query_width), k and v (kv_width) of a token; q and k rotated.
    fn project(
        &self,
        weights: &LayerWeights,
        vectors: &LayerVectors,
        h: &[f32],
        position: u32,
    ) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let config = &self.config;
        let mut q = matvec(&weights.q, h);
        let mut k = matvec(&weights.k, h);
        let mut v = matvec(&weights.v, h);
        if config.qkv_bias {
            add(&mut q, &vectors.q_bias);
            add(&mut k, &vectors.k_bias);
            add(&mut v, &vectors.v_bias);
        }
        for (heads, gain) in [(&mut q, &vectors.q_norm), (&mut k, &vectors.k_norm)] {
            for head in heads.chunks_exact_mut(config.head_dim as usize) {
                if config.qk_norm {
                    let normed = self.rms_norm(head, gain);
                    head.copy_from_slice(&normed);
                }
                self.rotate(head, position);
            }
        }
        (q, k, v)
    }

    /// softmax(q . k / sqrt(head_dim)) . v for every query head; query_width.
    fn attend(&self, q: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
        let config = &self.config;
        let (head_dim, kv_width) = (config.head_dim as usize, config.kv_width() as usize);
        let positions = keys.len() / kv_width;
        let window = config.sliding_window.map_or(positions, |window| window as usize);
        let visible = positions.saturating_sub(window)..positions;
        let group = (config.heads / config.kv_heads) as usize;
        let mut out = Vec::with_capacity(q.len());
        for (head, q) in q.chunks_exact(head_dim).enumerate() {
            let column = head / group * head_dim;
            let row = |cache: &[f32], position: usize| -> Vec<f32> {
                cache[position * kv_width + column..][..head_dim].to_vec()
            };
            let scale = 1.0 / (head_dim as f64).sqrt();
            let scores: Vec<f64> = visible.clone().map(|p| scale * dot(q, &row(keys, p))).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let shares: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let total: f64 = shares.iter().sum();
            let mut sum = vec![0f64; head_dim];
            for (share, position) in shares.iter().zip(visible.clone()) {
                let v = row(values, position);
                sum.iter_mut().zip(v).for_each(|(s, v)| *s += share / total * f64::from(v));
            }
            out.extend(sum.iter().map(|&s| s as f32));
        }
        out
    }

    /// x / sqrt(mean(x^2) + epsilon) * gain.
    fn rms_norm(&self, x: &[f32], gain: &[f32]) -> Vec<f32> {
        let mean_square = dot(x, x) / x.len() as f64;
        let scale = 1.0 / (mean_square + f64::from(self.config.norm_epsilon)).sqrt();
        x.iter().zip(gain).map(|(&x, &gain)| (f64::from(x) * scale) as f32 * gain).collect()
    }

    /// Turns the pairs (i, i + head_dim / 2) of a head.
    fn rotate(&self, head: &mut [f32], position: u32) {
        let (first, second) = head.split_at_mut(self.frequencies.len());
        for ((a, b), &frequency) in first.iter_mut().zip(second).zip(&self.frequencies) {
            let (cos, sin) = rope_turn(position, frequency);
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// Row-major matrix times vector.
fn matvec(matrix: &[f32], x: &[f32]) -> Vec<f32> {
    matrix.chunks_exact(x.len()).map(|row| dot(row, x) as f32).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
