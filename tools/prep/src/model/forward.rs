//! [`Forward`]: the dense model over windows of tokens, one layer's weights in memory at a time.
//!
//! Matrix products are candle's; the rest is plain loops over rows, spread over the processors. On a card what stands
//! between two products is tensor operations too (`in_tensors`), as a copy there and back would cost more than they.
//! Rows are tokens, in whole windows; a window is a text of its own, at positions 0, 1, …. The residual stream belongs to
//! the caller, who pushes it through a layer in as many pieces as memory asks for. The definition is
//! [`ls_compute::reference`]; tests compare the two.

mod tensors;

use crate::device;
use crate::encode::encode_row;
use crate::error::{PrepError, Result};
use crate::model::Model;
use crate::model::roles::{Part, Role};
use candle_core::{Device, Tensor};
use ls_bundle::model::{DType, LayerVectors, ModelConfig, QUANT_GROUP, Vectors};
use ls_compute::{dequantize_row, rope_frequencies, rope_turn};
use rayon::prelude::*;

/// Rows of the head that are multiplied at a time.
const HEAD_ROWS: u32 = 4096;
/// Positions whose attention is computed together.
const STRIP: usize = 128;

/// A model ready to push windows through.
#[derive(Debug)]
pub struct Forward<'a> {
    model: &'a Model,
    vectors: Vectors,
    window: usize,
    /// Cosine and sine, position x head_dim / 2.
    turns: Vec<(f32, f32)>,
    device: Device,
    /// Whether what stands between products is tensor operations, not loops.
    in_tensors: bool,
}

/// The weights of one layer. A clone shares them until one is replaced.
#[derive(Clone, Debug)]
pub struct Layer<'a> {
    config: &'a ModelConfig,
    vectors: &'a LayerVectors,
    turns: &'a [(f32, f32)],
    window: usize,
    device: &'a Device,
    in_tensors: bool,
    /// query_width x hidden, kv_width x hidden (twice), hidden x query_width.
    attention: [Tensor; 4],
    /// ffn_hidden x hidden.
    gate: Tensor,
    /// ffn_hidden x hidden.
    up: Tensor,
    /// hidden x ffn_hidden.
    down: Tensor,
}

fn fault(problem: candle_core::Error) -> PrepError {
    PrepError::corrupt("tensor arithmetic", problem)
}

/// rows x cols.
fn matrix(values: Vec<f32>, cols: usize, device: &Device) -> Result<Tensor> {
    let rows = values.len() / cols;
    Tensor::from_vec(values, (rows, cols), device).map_err(fault)
}

/// All elements, row-major.
fn elements(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all().and_then(|flat| flat.to_vec1()).map_err(fault)
}

/// `x` (rows x inputs) times the transpose of `weights` (outputs x inputs).
fn linear(x: &Tensor, weights: &Tensor) -> Result<Tensor> {
    weights.t().and_then(|weights| x.matmul(&weights)).map_err(fault)
}

impl<'a> Forward<'a> {
    /// Reads the small vectors of `model`, for windows of `window` tokens. Runs on the process's device.
    pub fn new(model: &'a Model, window: u32) -> Result<Forward<'a>> {
        Forward::on(model, window, device::current())
    }

    /// The same on another device.
    pub fn on(model: &'a Model, window: u32, device: &Device) -> Result<Forward<'a>> {
        let frequencies = rope_frequencies(&model.config.rope, model.config.head_dim);
        let turn = |position| frequencies.iter().map(move |&f| rope_turn(position, f));
        let turns = (0..window).flat_map(turn).collect();
        let (vectors, window) = (model.vectors()?, window as usize);
        let (device, in_tensors) = (device.clone(), !device.is_cpu());
        Ok(Forward { model, vectors, window, turns, device, in_tensors })
    }

    /// The same with tensor operations between products on the processor too, where loops are faster.
    #[must_use]
    pub fn in_tensors(self) -> Forward<'a> {
        Forward { in_tensors: true, ..self }
    }

    /// Tokens of a window.
    #[must_use]
    pub fn window(&self) -> usize {
        self.window
    }

    /// Shape and arithmetic.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    /// Hands out the embedding (hidden) of each of `tokens` with its index, in the order of the table, which is read
    /// once.
    pub fn embed(
        &self,
        tokens: &[u32],
        mut put: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let mut order: Vec<usize> = (0..tokens.len()).collect();
        order.sort_by_key(|&index| tokens[index]);
        let mut rows = self.model.weights.rows(Role::Embedding);
        order.into_iter().try_for_each(|index| put(index, rows.row(tokens[index])?))
    }

    /// Reads the weights of a layer.
    pub fn layer(&self, layer: u16) -> Result<Layer<'_>> {
        let config = self.config();
        let (hidden, query) = (config.hidden, config.query_width());
        let read = |part, cols| self.read(Role::Layer(layer, part), cols);
        Ok(Layer {
            config,
            vectors: &self.vectors.layers[usize::from(layer)],
            turns: &self.turns,
            window: self.window,
            device: &self.device,
            in_tensors: self.in_tensors,
            attention: [
                read(Part::Query, hidden)?,
                read(Part::Key, hidden)?,
                read(Part::Value, hidden)?,
                read(Part::Output, query)?,
            ],
            gate: read(Part::Gate, hidden)?,
            up: read(Part::Up, hidden)?,
            down: read(Part::Down, config.ffn_hidden)?,
        })
    }

    fn read(&self, role: Role, cols: u32) -> Result<Tensor> {
        let rows = self.model.weights.shape(role).expect("the model has it")[0] as u32;
        let mut values = Vec::with_capacity(rows as usize * cols as usize);
        let mut source = self.model.weights.rows(role);
        for row in 0..rows {
            values.extend_from_slice(source.row(row)?);
        }
        matrix(values, cols as usize, &self.device)
    }

    /// Logits of the residuals `x` behind the last layer, a piece of the vocabulary at a time: `take` gets the first
    /// token of the piece, its width, and rows x width logits.
    fn head(
        &self,
        x: &[f32],
        mut take: impl FnMut(u32, usize, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let config = self.config();
        let role = if config.tied_head { Role::Embedding } else { Role::Head };
        let hidden = config.hidden as usize;
        let x = rms_norm(x, &self.vectors.final_norm, config.norm_epsilon);
        let x = matrix(x, hidden, &self.device)?;
        let mut rows = self.model.weights.rows(role);
        for first in (0..config.vocab_size).step_by(HEAD_ROWS as usize) {
            let count = HEAD_ROWS.min(config.vocab_size - first);
            let mut values = Vec::with_capacity(count as usize * hidden);
            for row in first..first + count {
                values.extend_from_slice(rows.row(row)?);
            }
            let logits = linear(&x, &matrix(values, hidden, &self.device)?)?;
            take(first, count as usize, &logits)?;
        }
        Ok(())
    }

    /// Logits (rows x vocab_size) of the residuals `x` behind the last layer.
    pub fn logits(&self, x: &[f32]) -> Result<Vec<f32>> {
        let (hidden, vocab) = (self.config().hidden as usize, self.config().vocab_size as usize);
        let mut all = vec![0.0; x.len() / hidden * vocab];
        self.head(x, |first, width, logits| {
            let logits = elements(logits)?;
            for (row, logits) in all.chunks_exact_mut(vocab).zip(logits.chunks_exact(width)) {
                row[first as usize..][..width].copy_from_slice(logits);
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// Negative log-likelihood of `targets`, one for each row of the residuals `x` behind the last layer.
    pub fn nll(&self, x: &[f32], targets: &[u32]) -> Result<Vec<f32>> {
        // Of each row: the largest logit, the sum of exponentials beside it, the target's logit.
        let mut states = vec![(f64::NEG_INFINITY, 0f64, 0f64); targets.len()];
        self.head(x, |first, width, logits| {
            if self.in_tensors {
                return tensors::add_piece(&mut states, targets, first, logits).map_err(fault);
            }
            let logits = elements(logits)?;
            let rows = states.par_iter_mut().zip(targets).zip(logits.par_chunks_exact(width));
            rows.for_each(|((state, &target), logits)| {
                let largest = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
                let largest = state.0.max(f64::from(largest));
                let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
                state.1 = state.1 * (state.0 - largest).exp() + sum;
                state.0 = largest;
                if let Some(&logit) = target.checked_sub(first).and_then(|i| logits.get(i as usize))
                {
                    state.2 = f64::from(logit);
                }
            });
            Ok(())
        })?;
        Ok(states
            .iter()
            .map(|&(largest, sum, logit)| (largest + sum.ln() - logit) as f32)
            .collect())
    }
}

impl Layer<'_> {
    /// Width of the residual stream.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.config.hidden as usize
    }

    /// Number of neurons.
    #[must_use]
    pub fn ffn_hidden(&self) -> usize {
        self.config.ffn_hidden as usize
    }

    /// Adds attention's output to the residuals `x`, whole windows of tokens x hidden.
    pub fn attend(&self, x: &mut [f32]) -> Result<()> {
        let attended = self.attended(self.attention_input(x))?;
        add(x, &elements(&linear(&attended, &self.attention[3])?)?);
        Ok(())
    }

    /// The input of q, k and v: the residuals `x`, normalised.
    #[must_use]
    pub fn attention_input(&self, x: &[f32]) -> Vec<f32> {
        rms_norm(x, &self.vectors.attn_norm, self.config.norm_epsilon)
    }

    /// What all heads make of the inputs of q, k and v, whole windows; tokens x query_width, the input of o.
    pub fn attention(&self, input: Vec<f32>) -> Result<Vec<f32>> {
        elements(&self.attended(input)?)
    }

    fn attended(&self, input: Vec<f32>) -> Result<Tensor> {
        let input = matrix(input, self.config.hidden as usize, self.device)?;
        let ([q, k, v, _], vectors) = (&self.attention, self.vectors);
        let q = self.heads(&input, q, &vectors.q_bias, Some(&vectors.q_norm))?;
        let k = self.heads(&input, k, &vectors.k_bias, Some(&vectors.k_norm))?;
        let v = self.heads(&input, v, &vectors.v_bias, None)?;
        self.mix(&q, &k, &v).map_err(fault)
    }

    /// q, k or v of `input`; tokens x width. q and k come with a `gain`, which is empty where the model does not
    /// normalise them.
    fn heads(
        &self,
        input: &Tensor,
        weights: &Tensor,
        bias: &[f32],
        gain: Option<&[f32]>,
    ) -> Result<Tensor> {
        let product = linear(input, weights)?;
        let bias = if self.config.qkv_bias { bias } else { &[] };
        if self.in_tensors {
            return tensors::heads(self, product, bias, gain).map_err(fault);
        }
        if bias.is_empty() && gain.is_none() {
            return Ok(product);
        }
        let (mut rows, width) = (elements(&product)?, product.dim(1).map_err(fault)?);
        if !bias.is_empty() {
            add_bias(&mut rows, bias);
        }
        if let Some(gain) = gain {
            self.turn(&mut rows, width, gain);
        }
        matrix(rows, width, self.device)
    }

    /// What o makes of its inputs; tokens x hidden.
    pub fn attention_output(&self, attended: Vec<f32>) -> Result<Vec<f32>> {
        let attended = matrix(attended, self.config.query_width() as usize, self.device)?;
        elements(&linear(&attended, &self.attention[3])?)
    }

    /// A matrix as [`Role`]'s shapes say, row after row.
    pub fn weights(&self, part: Part) -> Result<Vec<f32>> {
        elements(self.tensor(part))
    }

    /// Runs with other weights in the place of a matrix, row after row.
    pub fn replace(&mut self, part: Part, values: Vec<f32>) -> Result<()> {
        let cols = self.tensor(part).dim(1).map_err(fault)?;
        *self.tensor_mut(part) = matrix(values, cols, self.device)?;
        Ok(())
    }

    fn tensor(&self, part: Part) -> &Tensor {
        match part {
            Part::Query => &self.attention[0],
            Part::Key => &self.attention[1],
            Part::Value => &self.attention[2],
            Part::Output => &self.attention[3],
            Part::Gate => &self.gate,
            Part::Up => &self.up,
            Part::Down => &self.down,
            _ => unreachable!("{part:?} is no matrix"),
        }
    }

    fn tensor_mut(&mut self, part: Part) -> &mut Tensor {
        match part {
            Part::Query => &mut self.attention[0],
            Part::Key => &mut self.attention[1],
            Part::Value => &mut self.attention[2],
            Part::Output => &mut self.attention[3],
            Part::Gate => &mut self.gate,
            Part::Up => &mut self.up,
            Part::Down => &mut self.down,
            _ => unreachable!("{part:?} is no matrix"),
        }
    }

    /// Normalises the heads of q or k where the model does, and turns them to their positions. `width` is a row's.
    fn turn(&self, rows: &mut [f32], width: usize, gain: &[f32]) {
        let half = self.config.head_dim as usize / 2;
        let (window, epsilon) = (self.window, self.config.norm_epsilon);
        rows.par_chunks_exact_mut(width).enumerate().for_each(|(token, row)| {
            let turns = &self.turns[token % window * half..][..half];
            for head in row.chunks_exact_mut(2 * half) {
                if !gain.is_empty() {
                    let raw = head.to_vec();
                    norm_row(&raw, gain, epsilon, head);
                }
                let (first, second) = head.split_at_mut(half);
                for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(turns) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        });
    }

    /// softmax(q k) v for every head of every window; tokens x query_width. A strip of positions at a time, against the
    /// keys that any of them may see: half the work of all against all.
    fn mix(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let config = self.config;
        let (length, head_dim) = (self.window, config.head_dim as usize);
        let (kv_heads, group) =
            (config.kv_heads as usize, (config.heads / config.kv_heads) as usize);
        let windows = k.dim(0)? / length;
        let batch = windows * kv_heads;
        let q =
            q.reshape((windows, length, kv_heads, group, head_dim))?.permute((0, 2, 3, 1, 4))?;
        let side = |rows: &Tensor| {
            rows.reshape((windows, length, kv_heads, head_dim))?
                .transpose(1, 2)?
                .contiguous()?
                .reshape((batch, length, head_dim))
        };
        let (k, v) = (side(k)?, side(v)?);
        let scale = 1.0 / (head_dim as f64).sqrt();
        let reach = config.sliding_window.map_or(length, |window| window as usize);
        let mut strips = Vec::new();
        for start in (0..length).step_by(STRIP) {
            let count = STRIP.min(length - start);
            let first = (start + 1).saturating_sub(reach);
            let seen = start + count - first;
            // Query heads that share a key head become more rows of one product.
            let q = q.narrow(3, start, count)?.reshape((batch, group * count, head_dim))?;
            let (k, v) = (k.narrow(1, first, seen)?, v.narrow(1, first, seen)?);
            let scores = q.matmul(&k.t()?)?;
            let shares = if self.in_tensors {
                let scores = (scores * scale)?.reshape((batch * group, count, seen))?;
                tensors::softmax(&scores, start - first, reach)?
            } else {
                let mut scores: Vec<f32> = scores.flatten_all()?.to_vec1()?;
                scores.par_chunks_exact_mut(seen).enumerate().for_each(|(row, scores)| {
                    softmax(scores, start - first + row % count, reach, scale);
                });
                Tensor::from_vec(scores, (batch, group * count, seen), self.device)?
            };
            let shares = shares.reshape((batch, group * count, seen))?;
            let mixed = shares.matmul(&v)?.reshape((windows, kv_heads, group, count, head_dim))?;
            strips.push(mixed.permute((0, 3, 1, 2, 4))?);
        }
        Tensor::cat(&strips, 1)?.reshape((windows * length, config.query_width() as usize))
    }

    /// The FFN's input: the residuals `x`, normalised.
    #[must_use]
    pub fn ffn_input(&self, x: &[f32]) -> Vec<f32> {
        rms_norm(x, &self.vectors.mlp_norm, self.config.norm_epsilon)
    }

    /// gate h and up h for the FFN inputs `h`; tokens x ffn_hidden each.
    pub fn gate_up(&self, h: &[f32]) -> Result<[Vec<f32>; 2]> {
        let h = matrix(h.to_vec(), self.config.hidden as usize, self.device)?;
        Ok([elements(&linear(&h, &self.gate)?)?, elements(&linear(&h, &self.up)?)?])
    }

    /// The weights of gate, up and down as a bundle keeps them: each neuron's rows and its column; ffn_hidden x hidden.
    pub fn neurons(&self) -> Result<[Vec<f32>; 3]> {
        let down = self.down.t().map_err(fault)?;
        Ok([elements(&self.gate)?, elements(&self.up)?, elements(&down)?])
    }

    /// The same layer with the FFN's weights that a bundle would keep in the format `dtype`.
    pub fn rounded(self, dtype: DType) -> Result<Self> {
        let config = self.config;
        if dtype != DType::F16 && !config.hidden.is_multiple_of(QUANT_GROUP) {
            let problem = format!("rows of {} weights in groups of {QUANT_GROUP}", config.hidden);
            return Err(PrepError::unsupported(problem));
        }
        let hidden = config.hidden as usize;
        let round = |mut weights: Vec<f32>| {
            weights.par_chunks_exact_mut(hidden).try_for_each(|row| round_row(dtype, row))?;
            matrix(weights, hidden, self.device)
        };
        let [gate, up, down] = self.neurons()?;
        let (gate, up, down) = (round(gate)?, round(up)?, round(down)?);
        let down = down.t().and_then(|down| down.contiguous()).map_err(fault)?;
        Ok(Layer { gate, up, down, ..self })
    }

    /// SiLU(gate h) * (up h) of every neuron for the FFN inputs `h`; tokens x ffn_hidden.
    pub fn activations(&self, h: Vec<f32>) -> Result<Vec<f32>> {
        let h = matrix(h, self.config.hidden as usize, self.device)?;
        if self.in_tensors {
            return elements(&self.exact(&h)?);
        }
        let (mut gate, up) =
            (elements(&linear(&h, &self.gate)?)?, elements(&linear(&h, &self.up)?)?);
        gate.par_iter_mut().zip(&up).with_min_len(1 << 12).for_each(|(gate, up)| {
            *gate = activation(*gate, *up);
        });
        Ok(gate)
    }

    /// [`Layer::activations`] in tensors.
    pub(crate) fn exact(&self, h: &Tensor) -> Result<Tensor> {
        let (gate, up) = (linear(h, &self.gate)?, linear(h, &self.up)?);
        gate.silu().and_then(|gate| gate * up).map_err(fault)
    }

    /// [`Layer::ffn_output`] in tensors.
    pub(crate) fn output(&self, activations: &Tensor) -> Result<Tensor> {
        linear(activations, &self.down)
    }

    /// The device that it computes on if what stands between products is to be tensor operations.
    pub(crate) fn tensors_on(&self) -> Option<&Device> {
        self.in_tensors.then_some(self.device)
    }

    /// What neurons with these activations (tokens x ffn_hidden) add to the residuals; tokens x hidden.
    pub fn ffn_output(&self, activations: Vec<f32>) -> Result<Vec<f32>> {
        let activations = matrix(activations, self.config.ffn_hidden as usize, self.device)?;
        elements(&self.output(&activations)?)
    }
}

/// Replaces weights by what their form in `dtype` stands for.
fn round_row(dtype: DType, row: &mut [f32]) -> Result<()> {
    let mut bytes = vec![0; dtype.row_bytes(row.len() as u32) as usize];
    encode_row(dtype, row, &mut bytes).map_err(|found| {
        PrepError::unsupported(format!("a weight of {} in {dtype:?}", found.value))
    })?;
    dequantize_row(dtype, &bytes, row);
    Ok(())
}

/// SiLU(gate) * up.
#[must_use]
pub fn activation(gate: f32, up: f32) -> f32 {
    gate / (1.0 + (-gate).exp()) * up
}

/// Softmax of the scores that position `position` may see; zero for the others.
fn softmax(scores: &mut [f32], position: usize, reach: usize, scale: f64) {
    let first = (position + 1).saturating_sub(reach);
    let (seen, future) = scores.split_at_mut(position + 1);
    let (past, seen) = seen.split_at_mut(first);
    past.fill(0.0);
    future.fill(0.0);
    let largest = seen.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
    let mut total = 0f64;
    for score in seen.iter_mut() {
        *score = ((*score - largest) * scale as f32).exp();
        total += f64::from(*score);
    }
    let inverse = (1.0 / total) as f32;
    seen.iter_mut().for_each(|share| *share *= inverse);
}

/// x / sqrt(mean(x^2) + epsilon) * gain, for each row of gain.len().
fn rms_norm(x: &[f32], gain: &[f32], epsilon: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    let width = gain.len();
    out.par_chunks_exact_mut(width).zip(x.par_chunks_exact(width)).for_each(|(out, x)| {
        norm_row(x, gain, epsilon, out);
    });
    out
}

pub(crate) fn norm_row(x: &[f32], gain: &[f32], epsilon: f32, out: &mut [f32]) {
    let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let scale = 1.0 / (squares / x.len() as f64 + f64::from(epsilon)).sqrt();
    for ((out, &x), &gain) in out.iter_mut().zip(x).zip(gain) {
        *out = (f64::from(x) * scale) as f32 * gain;
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn add_bias(rows: &mut [f32], bias: &[f32]) {
    rows.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
}

/// Floating-point operations a second of matrix products on this machine, now: the median of a few short ones.
pub fn operations_per_second() -> Result<f64> {
    const SIZE: usize = 512;
    let values: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 7) as f32).collect();
    let square = matrix(values, SIZE, device::current())?;
    let mut speeds = Vec::new();
    for _ in 0..5 {
        let start = std::time::Instant::now();
        elements(&linear(&square, &square)?)?;
        speeds.push(2.0 * (SIZE * SIZE * SIZE) as f64 / start.elapsed().as_secs_f64());
    }
    speeds.sort_by(f64::total_cmp);
    Ok(speeds[2])
}
