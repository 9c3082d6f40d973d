//! The fit of one layer's base.

use super::content::{LayerInfo, LeftOver, encode_records, encode_tables};
use super::{Params, content};
use crate::base::{Doubt, Histogram, LayerBase, largest, masked, mean_squares, relate};
use crate::descent::{self, Hessian};
use crate::error::{PrepError, Result};
use crate::gptq::{Feedback, Gram, Grid, Quantised, across_inputs, along_inputs};
use crate::lloyd::fit_codebook;
use crate::matmul::{add_product, add_squares};
use crate::model::forward::{Forward, Layer, activation};
use crate::stages::activations::Activations;
use faer::linalg::matmul::matmul;
use faer::linalg::solvers::Solve;
use faer::{Accum, Mat, MatRef, Side, get_global_parallelism};
use half::slice::HalfFloatSliceExt;
use ls_bundle::low_bit::{Bits, Codebook, GROUP, RecordLayout};
use std::ops::Range;

/// Tokens held out, about: they measure the base's errors in g and u.
const HELD_OUT_TOKENS: u64 = 2048;
/// Of these so many, at most and spread over all, measure what the base leaves of the output, which takes several passes.
const LEFT_OVER_TOKENS: usize = 512;
/// Shares of exact neurons at which that is measured.
const MEASURED_SHARES: [f64; 5] = [0.0, 0.1, 0.2, 0.3, 0.5];
/// How far a column may be shrunk or drawn out.
const SHRINKAGE: Range<f32> = 0.1..1.5;

pub(super) struct Fit<'a> {
    forward: &'a Forward<'a>,
    activations: &'a Activations,
    params: &'a Params,
    layout: RecordLayout,
}

/// FFN inputs of a chunk, tokens x hidden.
struct Inputs {
    fitted: Vec<f32>,
    held_out: Vec<f32>,
    /// Of the held-out tokens' residuals.
    mean_squares: Vec<f32>,
}

/// A rounded matrix and what its codes stand for.
struct Rounded {
    codebook: Codebook,
    grid: Grid,
    rows: Quantised,
}

/// What held-out tokens make of the exact weights.
struct Sample {
    h: Vec<f32>,
    /// Of the residuals; tokens.
    mean_squares: Vec<f32>,
    /// SiLU(g) u; tokens x neurons.
    exact: Vec<f32>,
}

/// Sums over the fitted tokens of stand-ins c and of what they stand in for, a block of neurons at a time.
struct Sums {
    blocks: Vec<Block>,
    /// Of c; neurons.
    stand_ins: Vec<f64>,
    /// Of h c over unselected neurons; neurons.
    products: Vec<f64>,
    /// Of h over unselected neurons; neurons.
    exact: Vec<f64>,
    tokens: usize,
}

struct Block {
    neurons: Range<usize>,
    gram: Gram,
    /// Sum of c h, h of unselected neurons; neurons of the block x neurons of the block. Times their columns it is the
    /// sum of c times what they add.
    cross: Vec<f32>,
}

impl<'a> Fit<'a> {
    pub(super) fn new(
        forward: &'a Forward<'a>,
        activations: &'a Activations,
        params: &'a Params,
    ) -> Result<Fit<'a>> {
        Ok(Fit { forward, activations, params, layout: params.layout()? })
    }

    /// The records of a layer.
    pub(super) fn layer(&self, number: u32) -> Result<Vec<Vec<u8>>> {
        let weights = self.forward.layer(number as u16)?;
        let [gate, up, down] = weights.neurons()?;
        let hidden = self.params.hidden as usize;
        let (mut gram, mut h, mut squares) = (Gram::new(hidden), Vec::new(), Vec::new());
        for chunk in 0..self.activations.params().chunks() {
            let Inputs { fitted, held_out, mean_squares } = self.inputs(&weights, number, chunk)?;
            gram.add(MatRef::from_row_major_slice(&fitted, fitted.len() / hidden, hidden));
            h.extend(held_out);
            squares.extend(mean_squares);
        }
        let feedback = Feedback::new(&gram, self.params.damping, false)?;
        let hessian = Hessian::new(&gram, self.params.damping);
        let rounded = |matrix: &[f32], bits: u32| {
            let mut rounded = Rounded::along(matrix, bits, &feedback);
            let Rounded { grid, rows, .. } = &mut rounded;
            descent::along_inputs(matrix, &hessian, grid, rows, self.params.sweeps);
            rounded
        };
        let gate_low = rounded(&gate, self.params.bits[0]);
        let up_low = rounded(&up, self.params.bits[1]);
        let mut base = LayerBase {
            gate: gate_low.decode(),
            up: up_low.decode(),
            down: None,
            doubt: Doubt::default(),
            constant: vec![0.0; hidden],
        };
        let [g, u] = weights.gate_up(&h)?;
        let exact = g.iter().zip(&u).map(|(&g, &u)| activation(g, u)).collect();
        let sample = Sample { h, mean_squares: squares, exact };
        let product_errors = self.doubt(&mut base, &down, &sample, [&g, &u]);
        let down_low = match Bits::new(self.params.bits[2]) {
            Some(bits) => Some(self.down(&weights, number, &down, bits, &mut base)?),
            None => None,
        };
        let (tables, largest) = encode_tables(&base);
        let codebooks =
            [Some(gate_low.codebook), Some(up_low.codebook), down_low.as_ref().map(|d| d.codebook)];
        let doubts = Histogram::of(&[]);
        let left_over = Vec::new();
        let mut info = LayerInfo { codebooks, largest, product_errors, doubts, left_over };
        let parts = [Some(&gate_low.rows), Some(&up_low.rows), down_low.as_ref().map(|d| &d.rows)];
        let records = encode_records(self.layout, parts, self.params.neurons as usize);
        let base = content::decode(self.params, self.layout, &info, &records, &tables)
            .expect("it was just encoded");
        sample.measure(&base, &down, &mut info);
        Ok(vec![serde_json::to_vec(&info).expect("plain data"), records, tables])
    }

    /// The FFN inputs of a chunk's tokens that take part.
    fn inputs(&self, weights: &Layer<'_>, layer: u32, chunk: u32) -> Result<Inputs> {
        let chunk = self.activations.chunk(layer, chunk)?;
        let hidden = self.params.hidden as usize;
        let step = self.activations.params().tokens.div_ceil(self.params.hessian_tokens);
        let held_out_every = (self.params.hessian_tokens / HELD_OUT_TOKENS).max(2);
        let (mut fitted, mut held_out) = (Vec::new(), Vec::new());
        for token in 0..chunk.tokens() {
            let number = chunk.first_token + token as u64;
            if !number.is_multiple_of(step) {
                continue;
            }
            let is_held_out = (number / step + 1).is_multiple_of(held_out_every);
            let rows = if is_held_out { &mut held_out } else { &mut fitted };
            let start = rows.len();
            rows.resize(start + hidden, 0.0);
            chunk.input(token).convert_to_f32_slice(&mut rows[start..]);
        }
        Ok(Inputs {
            fitted: weights.ffn_input(&fitted),
            mean_squares: mean_squares(&held_out, hidden),
            held_out: weights.ffn_input(&held_out),
        })
    }

    /// Sets what the neurons' errors weigh, as far as gate and up tell; down's part is what its bits leave of a bell
    /// (all, if there is no down). `exact` is g and u of the sample. Returns the relative errors of g~ and u~.
    fn doubt(
        &self,
        base: &mut LayerBase,
        down: &[f32],
        sample: &Sample,
        exact: [&[f32]; 2],
    ) -> [f64; 2] {
        const LEFT: [f32; 5] = [1.0, 0.6, 0.34, 0.19, 0.1];
        let (hidden, neurons) = (self.params.hidden as usize, self.params.neurons as usize);
        let norms: Vec<f32> = down.chunks_exact(hidden).map(norm).collect();
        let mut relative = [0.0; 2];
        let mut spreads = Vec::new();
        let found = base.gate_up(&sample.h);
        for ((found, exact), relative) in found.iter().zip(exact).zip(&mut relative) {
            let (mut errors, mut squares) = (vec![0f64; neurons], 0f64);
            for (found, exact) in found.chunks_exact(neurons).zip(exact.chunks_exact(neurons)) {
                for ((sum, &x), &y) in errors.iter_mut().zip(found).zip(exact) {
                    *sum += f64::from(x - y).powi(2);
                    squares += f64::from(y).powi(2);
                }
            }
            *relative = errors.iter().sum::<f64>() / squares;
            let tokens = (exact.len() / neurons) as f64;
            let spread = errors.iter().map(|sum| (sum / tokens).sqrt() as f32);
            spreads.push(spread.zip(&norms).map(|(s, norm)| s * norm).collect::<Vec<f32>>());
        }
        let left = LEFT[self.params.bits[2] as usize];
        base.doubt.up = spreads.pop().expect("two");
        base.doubt.gate = spreads.pop().expect("two");
        base.doubt.down = norms.iter().map(|norm| left * norm).collect();
        relative
    }

    /// Fits and rounds down; completes `base`.
    fn down(
        &self,
        weights: &Layer<'_>,
        layer: u32,
        down: &[f32],
        bits: Bits,
        base: &mut LayerBase,
    ) -> Result<Rounded> {
        let hidden = self.params.hidden as usize;
        let sums = self.sums(weights, layer, base)?;
        let mut targets = Vec::with_capacity(down.len());
        for block in &sums.blocks {
            targets.extend(self.target(block, &sums, down)?);
        }
        let codebook = fit_codebook(bits, &targets, GROUP);
        let grid = Grid::low_bit(&codebook);
        let mut rows =
            Quantised { cols: hidden, group: GROUP, codes: Vec::new(), scales: Vec::new() };
        for block in &sums.blocks {
            let feedback = Feedback::new(&block.gram, self.params.damping, true)?;
            let Range { start, end } = block.neurons;
            let target = &targets[start * hidden..end * hidden];
            let mut part = across_inputs(target, &feedback, &grid);
            let hessian = Hessian::new(&block.gram, self.params.damping);
            descent::across_inputs(target, &hessian, &grid, &mut part, self.params.sweeps);
            rows.codes.extend(part.codes);
            rows.scales.extend(part.scales);
        }
        let rounded = Rounded { codebook, grid, rows };
        let low = rounded.decode();
        let rows = down.chunks_exact(hidden).zip(low.chunks_exact(hidden));
        base.doubt.down = rows
            .map(|(d, low)| norm(&d.iter().zip(low).map(|(a, b)| a - b).collect::<Vec<f32>>()))
            .collect();
        let mut constant = vec![0f64; hidden];
        for (neuron, row) in low.chunks_exact(hidden).enumerate() {
            let (exact, stand_in) = (sums.exact[neuron], sums.stand_ins[neuron]);
            for ((sum, &d), &low) in constant.iter_mut().zip(&down[neuron * hidden..]).zip(row) {
                *sum += exact * f64::from(d) - stand_in * f64::from(low);
            }
        }
        base.constant = constant.iter().map(|m| (m / sums.tokens as f64) as f32).collect();
        base.down = Some(low);
        Ok(rounded)
    }

    /// Runs the fitted tokens.
    fn sums(&self, weights: &Layer<'_>, layer: u32, base: &LayerBase) -> Result<Sums> {
        let neurons = self.params.neurons as usize;
        let width = neurons.div_ceil(neurons.div_ceil(self.params.feedback_neurons as usize));
        let block = |start: usize| {
            let range = start..(start + width).min(neurons);
            let (gram, cross) = (Gram::new(range.len()), vec![0.0; range.len() * range.len()]);
            Block { neurons: range, gram, cross }
        };
        let mut sums = Sums {
            blocks: (0..neurons).step_by(width).map(block).collect(),
            stand_ins: vec![0.0; neurons],
            products: vec![0.0; neurons],
            exact: vec![0.0; neurons],
            tokens: 0,
        };
        let counts = self.params.exact_shares.iter();
        let counts: Vec<usize> = counts.map(|s| (neurons as f64 * s).round() as usize).collect();
        for chunk in 0..self.activations.params().chunks() {
            let h = self.inputs(weights, layer, chunk)?.fitted;
            let [gate, up] = base.gate_up(&h);
            let chosen =
                largest(&base.doubt.of_rows(&gate, &up), neurons, |t| counts[t % counts.len()]);
            let stand_ins = base.stand_ins(&gate, &up, &chosen);
            let exact = masked(&weights.activations(h)?, &chosen, false);
            sums.add(&stand_ins, &exact);
        }
        Ok(sums)
    }

    /// The columns of a block that turn its stand-ins into what its neurons add.
    fn target(&self, block: &Block, sums: &Sums, down: &[f32]) -> Result<Vec<f32>> {
        let hidden = self.params.hidden as usize;
        let (first, width) = (block.neurons.start, block.neurons.len());
        let own = Mat::<f64>::from_fn(width, hidden, |neuron, output| {
            let squares = block.gram.at(neuron, neuron);
            let product = sums.products[first + neuron] as f32;
            let shrinkage = if squares > 0.0 { product / squares } else { 1.0 };
            let shrinkage = shrinkage.clamp(SHRINKAGE.start, SHRINKAGE.end);
            f64::from(shrinkage * down[(first + neuron) * hidden + output])
        });
        let damp = self.params.damping * block.gram.mean_diagonal();
        let mut hessian = Mat::from_fn(width, width, |i, j| f64::from(block.gram.at(i, j)));
        let mut crossed = vec![0f32; width * hidden];
        add_product(&block.cross, &down[first * hidden..][..width * hidden], width, &mut crossed);
        let mut rest = Mat::from_fn(width, hidden, |i, j| f64::from(crossed[i * hidden + j]));
        matmul(
            rest.as_mut(),
            Accum::Add,
            hessian.as_ref(),
            own.as_ref(),
            -1.0,
            get_global_parallelism(),
        );
        (0..width).for_each(|i| hessian[(i, i)] += damp);
        let factor = hessian.llt(Side::Lower).map_err(|_| {
            PrepError::unsupported(
                "the stand-ins' Hessian is not positive definite; raise base.damping",
            )
        })?;
        let step = factor.solve(&rest);
        let value = |index: usize| {
            let (i, j) = (index / hidden, index % hidden);
            (own[(i, j)] + step[(i, j)]) as f32
        };
        Ok((0..width * hidden).map(value).collect())
    }
}

impl Sums {
    /// Adds a chunk: stand-ins and exact activations, zero for selected neurons; tokens x neurons.
    fn add(&mut self, stand_ins: &[f32], exact: &[f32]) {
        let neurons = self.exact.len();
        let tokens = stand_ins.len() / neurons;
        let all = MatRef::from_row_major_slice(stand_ins, tokens, neurons);
        for block in &mut self.blocks {
            let which = block.neurons.clone();
            block.gram.add(all.subcols(which.start, which.len()));
            add_squares(stand_ins, exact, neurons, which, &mut block.cross);
        }
        for (c, h) in stand_ins.chunks_exact(neurons).zip(exact.chunks_exact(neurons)) {
            for neuron in 0..neurons {
                self.stand_ins[neuron] += f64::from(c[neuron]);
                self.products[neuron] += f64::from(c[neuron] * h[neuron]);
                self.exact[neuron] += f64::from(h[neuron]);
            }
        }
        self.tokens += tokens;
    }
}

impl Rounded {
    /// A matrix whose rows run along the inputs.
    fn along(matrix: &[f32], bits: u32, feedback: &Feedback) -> Rounded {
        let bits = Bits::new(bits).expect("the recipe was checked");
        let codebook = fit_codebook(bits, matrix, GROUP);
        let grid = Grid::low_bit(&codebook);
        let rows = along_inputs(matrix, feedback, &grid);
        Rounded { codebook, grid, rows }
    }

    fn decode(&self) -> Vec<f32> {
        self.rows.decode(&self.grid)
    }
}

fn norm(row: &[f32]) -> f32 {
    row.iter().map(|x| x * x).sum::<f32>().sqrt()
}

impl Sample {
    /// How much the base doubts itself, and what the output of some of the tokens lacks.
    fn measure(&self, base: &LayerBase, down: &[f32], info: &mut LayerInfo) {
        let (hidden, neurons) = (base.constant.len(), base.neurons());
        let [gate, up] = base.gate_up(&self.h);
        let mut scores = base.doubt.of_rows(&gate, &up);
        let every = self.mean_squares.len().div_ceil(LEFT_OVER_TOKENS).max(1);
        let some = |values: &[f32]| -> Vec<f32> {
            values.chunks_exact(neurons).step_by(every).flatten().copied().collect()
        };
        let [exact, gate, up, some_scores] = [&self.exact, &gate, &up, &scores].map(|v| some(v));
        let mut whole = vec![0f32; exact.len() / neurons * hidden];
        add_product(&exact, down, neurons, &mut whole);
        let squares: f64 = whole.iter().map(|&y| f64::from(y).powi(2)).sum();
        let measure = |exact_share: f64| {
            let count = (neurons as f64 * exact_share).round() as usize;
            let chosen = largest(&some_scores, neurons, |_| count);
            let mut found = vec![0f32; whole.len()];
            add_product(&masked(&exact, &chosen, true), down, neurons, &mut found);
            base.add(&gate, &up, &chosen, &mut found);
            let errors = whole.iter().zip(&found).map(|(&y, &x)| f64::from(x - y).powi(2));
            LeftOver { exact_share, error: errors.sum::<f64>() / squares }
        };
        info.left_over = MEASURED_SHARES.map(measure).to_vec();
        debug_assert_eq!(self.mean_squares.len() * hidden, self.h.len());
        relate(&mut scores, &self.mean_squares);
        info.doubts = Histogram::of(&scores);
    }
}
