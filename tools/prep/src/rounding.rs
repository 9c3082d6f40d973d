//! Rounds a model's layers to q4_0 so that the *model* stays close, not each weight: by what calibration text shows.
//!
//! Two streams of residuals go through the layers: x with the weights as they are, y with those before rounded already.
//! Matrices are rounded in the order of use, each for the inputs that it will really get. With a the input of a matrix W
//! in the exact stream and b that in the rounded one, its rounded form Q is to make least
//!
//! ```text
//! q, k, v, gate, up:   sum over tokens of |W a - Q b|^2
//! o, down:             sum over tokens of |x - (y + Q b)|^2 / |x|^2     x, y: the residuals behind it, and before
//! ```
//!
//! so o and down also make up for the errors that the residuals have gathered, and a token counts by the share of its
//! residual that is wrong, as the next norm divides by its size. That is least squares for a matrix of real numbers
//! (`moments`), from which error feedback ([`crate::gptq`]) and then a few sweeps of coordinate descent
//! ([`crate::descent`]) find one on the grid. Scales are fitted as the feedback goes, and anew in each sweep. Down's
//! groups lie in a neuron's column; its errors are handed from neuron to neuron.
//!
//! Left out: embedding and head (nothing before them to calibrate by, or two uses of one table), norms, and matrices of
//! other formats, whose rounding is taken for none.
//!
//! Memory: beside a layer's weights as f32, twice, the tokens times (2 hidden + the larger of query_width and
//! ffn_hidden) as f32, and a Hessian of [`FEEDBACK_NEURONS`] at most, which is 8 bytes a number a few times over. Same
//! tokens and same threads give the same bytes: it runs on the processor always.

mod moments;

use crate::descent::{self, Hessian};
use crate::encode::write_q4_0;
use crate::error::Result;
use crate::gptq::{Feedback, Grid, Quantised, across_inputs, along_inputs};
use crate::matmul::{add_product, times_transposed};
use crate::model::Model;
use crate::model::forward::{Forward, Layer};
use crate::model::roles::{Part, Role};
use crate::stages::prompts::Windows;
use candle_core::Device;
use ls_bundle::model::{DType, WeightTypes};
use moments::Moments;

/// Neurons among which down's errors are made up for; where there are more, one bunch after another.
pub const FEEDBACK_NEURONS: usize = 4096;
/// Added to Hessians' diagonals, as a share of the mean.
const DAMPING: f64 = 0.01;
/// Times that a rounded matrix is gone through again.
const SWEEPS: u32 = 2;
/// Tokens that go through a layer together, about.
const CHUNK_TOKENS: usize = 2048;

/// Whether calibration makes a difference to weights of these types.
#[must_use]
pub fn wanted(types: WeightTypes) -> bool {
    [types.attention, types.ffn].contains(&DType::Q4_0)
}

/// A model on its way through the layers.
#[derive(Debug)]
pub struct Rounder<'a> {
    forward: Forward<'a>,
    types: WeightTypes,
    streams: Streams,
    next: u16,
}

/// Residuals before a layer or behind it; tokens x hidden, whole windows.
#[derive(Debug)]
struct Streams {
    exact: Vec<f32>,
    rounded: Vec<f32>,
    hidden: usize,
    chunk_tokens: usize,
}

impl Streams {
    /// Both streams, a chunk at a time.
    fn chunks(&mut self) -> impl Iterator<Item = (&mut [f32], &mut [f32])> {
        let values = self.chunk_tokens * self.hidden;
        self.exact.chunks_mut(values).zip(self.rounded.chunks_mut(values))
    }
}

/// The matrices of a layer that were rounded.
#[derive(Debug, Default)]
pub struct RoundedLayer {
    layer: u16,
    parts: Vec<(Part, Quantised)>,
}

impl RoundedLayer {
    /// Writes a row (of down: a neuron's column) as a bundle holds it; false if the matrix was not rounded here.
    #[must_use]
    pub fn write_row(&self, role: Role, row: u32, into: &mut [u8]) -> bool {
        let is_it = |(part, _): &&(Part, Quantised)| role == Role::Layer(self.layer, *part);
        let Some((_, rounded)) = self.parts.iter().find(is_it) else { return false };
        let (codes, scales) = rounded.row(row as usize);
        write_q4_0(codes, scales, into);
        true
    }
}

impl<'a> Rounder<'a> {
    /// Of `model`, by the tokens of `windows`; matrices that `types` wants in q4_0.
    pub fn new(model: &'a Model, windows: &Windows, types: WeightTypes) -> Result<Rounder<'a>> {
        let forward = Forward::on(model, windows.window, &Device::Cpu)?;
        let (window, hidden) = (windows.window as usize, model.config.hidden as usize);
        let mut exact = vec![0.0; windows.tokens.len() * hidden];
        forward.embed(&windows.tokens, |token, row| {
            exact[token * hidden..][..hidden].copy_from_slice(row);
            Ok(())
        })?;
        let chunk_tokens = (CHUNK_TOKENS / window).max(1) * window;
        let streams = Streams { rounded: exact.clone(), exact, hidden, chunk_tokens };
        Ok(Rounder { forward, types, streams, next: 0 })
    }

    /// Rounds the next layer.
    pub fn layer(&mut self) -> Result<RoundedLayer> {
        let layer = self.next;
        self.next += 1;
        let exact = self.forward.layer(layer)?;
        let parts = Vec::new();
        let mut work = Work { low: exact.clone(), exact, streams: &mut self.streams, parts };
        let attention = self.types.attention == DType::Q4_0;
        let ffn = self.types.ffn == DType::Q4_0;
        if attention {
            work.round(&[Part::Query, Part::Key, Part::Value], Layer::attention_input)?;
        }
        work.attend(attention)?;
        if ffn {
            work.round(&[Part::Gate, Part::Up], Layer::ffn_input)?;
        }
        work.feed(ffn)?;
        Ok(RoundedLayer { layer, parts: work.parts })
    }
}

/// A layer in work.
struct Work<'a> {
    exact: Layer<'a>,
    /// The same with what is rounded so far.
    low: Layer<'a>,
    streams: &'a mut Streams,
    parts: Vec<(Part, Quantised)>,
}

impl<'a> Work<'a> {
    /// Rounds matrices that have the same input.
    fn round(&mut self, parts: &[Part], input: fn(&Layer<'a>, &[f32]) -> Vec<f32>) -> Result<()> {
        let hidden = self.streams.hidden;
        let mut moments = Moments::new(hidden, hidden);
        for (x, y) in self.streams.chunks() {
            let (a, b) = (input(&self.exact, x), input(&self.low, y));
            let error = difference(&a, &b);
            moments.add(b, error, None);
        }
        let solver = Solver::new(&moments, false)?;
        // W a - W b is W times the inputs' difference, so one correction does for all.
        let correction = moments.correction()?;
        for &part in parts {
            let mut target = self.exact.weights(part)?;
            let change = times_transposed(&target, &correction, hidden);
            add(&mut target, &change);
            let found = solver.along(&target);
            self.low.replace(part, found.decode(&solver.grid))?;
            self.parts.push((part, found));
        }
        Ok(())
    }

    /// Takes both streams behind attention, rounding o on the way.
    fn attend(&mut self, rounding: bool) -> Result<()> {
        let Work { exact, low, streams, parts } = self;
        let hidden = streams.hidden;
        let o_proj = exact.weights(Part::Output)?;
        let query = o_proj.len() / hidden;
        let (mut moments, mut inputs) = (Moments::new(query, hidden), Vec::new());
        for (x, y) in streams.chunks() {
            add(x, &exact.attention_output(exact.attention(exact.attention_input(x))?)?);
            let input = low.attention(low.attention_input(y))?;
            add(y, &exact.attention_output(input.clone())?);
            if rounding {
                inputs.extend_from_slice(&input);
                moments.add(input, difference(x, y), Some(&sizes(x, hidden)));
            }
        }
        if !rounding {
            return Ok(());
        }
        let solver = Solver::new(&moments, false)?;
        let mut target = o_proj.clone();
        add(&mut target, &transposed(&moments.correction()?, hidden));
        let found = solver.along(&target);
        let change = transposed(&difference(&found.decode(&solver.grid), &o_proj), query);
        let inputs = inputs.chunks(streams.chunk_tokens * query);
        for ((_, y), inputs) in streams.chunks().zip(inputs) {
            add_product(inputs, &change, query, y);
        }
        parts.push((Part::Output, found));
        Ok(())
    }

    /// Takes both streams behind the FFN, rounding down on the way.
    fn feed(&mut self, rounding: bool) -> Result<()> {
        let Work { exact, low, streams, parts } = self;
        let (hidden, neurons) = (streams.hidden, exact.ffn_hidden());
        let mut inputs = Vec::new();
        for (x, y) in streams.chunks() {
            add(x, &exact.ffn_output(exact.activations(exact.ffn_input(x))?)?);
            let input = low.activations(low.ffn_input(y))?;
            if rounding {
                inputs.extend_from_slice(&input);
            }
            add(y, &exact.ffn_output(input)?);
        }
        if !rounding {
            return Ok(());
        }
        let down = transposed(&exact.weights(Part::Down)?, neurons);
        let width = neurons.div_ceil(neurons.div_ceil(FEEDBACK_NEURONS));
        let mut whole =
            Quantised { cols: hidden, group: Grid::q4_0().group, codes: vec![], scales: vec![] };
        for first in (0..neurons).step_by(width) {
            let width = width.min(neurons - first);
            let columns = |chunk: &[f32]| -> Vec<f32> {
                chunk
                    .chunks_exact(neurons)
                    .flat_map(|row| &row[first..][..width])
                    .copied()
                    .collect()
            };
            let chunk = streams.chunk_tokens * neurons;
            let mut moments = Moments::new(width, hidden);
            for ((x, y), inputs) in streams.chunks().zip(inputs.chunks(chunk)) {
                moments.add(columns(inputs), difference(x, y), Some(&sizes(x, hidden)));
            }
            let solver = Solver::new(&moments, true)?;
            let own = &down[first * hidden..][..width * hidden];
            let mut target = own.to_vec();
            add(&mut target, &moments.correction()?);
            let found = solver.across(&target);
            let change = difference(&found.decode(&solver.grid), own);
            for ((_, y), inputs) in streams.chunks().zip(inputs.chunks(chunk)) {
                add_product(&columns(inputs), &change, width, y);
            }
            whole.codes.extend(found.codes);
            whole.scales.extend(found.scales);
        }
        parts.push((Part::Down, whole));
        Ok(())
    }
}

/// Finds the matrix on the grid whose products are nearest to those of a target.
struct Solver {
    grid: Grid,
    feedback: Feedback,
    hessian: Hessian,
}

impl Solver {
    fn new(moments: &Moments, important_first: bool) -> Result<Solver> {
        let gram = moments.gram();
        Ok(Solver {
            grid: Grid::q4_0(),
            feedback: Feedback::new(&gram, DAMPING, important_first)?,
            hessian: Hessian::new(&gram, DAMPING),
        })
    }

    fn along(&self, target: &[f32]) -> Quantised {
        let mut found = along_inputs(target, &self.feedback, &self.grid);
        descent::along_inputs(target, &self.hessian, &self.grid, &mut found, SWEEPS);
        found
    }

    fn across(&self, target: &[f32]) -> Quantised {
        let mut found = across_inputs(target, &self.feedback, &self.grid);
        descent::across_inputs(target, &self.hessian, &self.grid, &mut found, SWEEPS);
        found
    }
}

/// Root mean square of each row.
fn sizes(rows: &[f32], width: usize) -> Vec<f32> {
    let size = |row: &[f32]| (row.iter().map(|x| x * x).sum::<f32>() / width as f32).sqrt();
    rows.chunks_exact(width).map(size).collect()
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn difference(x: &[f32], y: &[f32]) -> Vec<f32> {
    x.iter().zip(y).map(|(x, y)| x - y).collect()
}

fn transposed(x: &[f32], cols: usize) -> Vec<f32> {
    let rows = x.len() / cols;
    let mut out = vec![0.0; x.len()];
    for (i, row) in x.chunks_exact(cols).enumerate() {
        row.iter().enumerate().for_each(|(j, &x)| out[j * rows + i] = x);
    }
    out
}
