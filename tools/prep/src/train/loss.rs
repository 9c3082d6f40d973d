//! [`Objective`]: how far a stack's outputs are from what they should be, with derivatives.
//!
//! [`BlockTargets`] are for scores of blocks. By default ([`Loss::Softmax`]) the scores' softmax is to be the token's
//! shares of importance: a cross-entropy weighted by importance. Its minimum is score = ln E\[share | feature\], and the
//! blocks of the largest expected importance are the ones to fetch. [`Loss::Binary`] asks of each block whether it is
//! among the strongest, weighted by importance too.
//!
//! [`ClassTargets`] are for a classification by the last index (softmax cross-entropy over Eq. 12's products) and
//! [`CodeTargets`] for a regression: binary cross-entropy on the bits of the quantised label's bin, in which
//! neighbouring bins share leading bits (section 3.3.2).

use super::lookup::patterns;
use crate::device;
use crate::stages::activations::decode_magnitude;
use candle_core::{CpuStorage, CustomOp2, D, DType, Device, Layout, Result, Shape, Tensor, Var};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex};

/// Weight of a block in [`Loss::Binary`] at which being wrong costs nothing.
const FLOOR: f32 = 0.1;
/// Of so many samples the loss of one is computed: it is for people, derivatives are for training.
const VALUE_EVERY: usize = 8;

/// What margins are multiplied with to be log-odds: they start near a deviation of 1.
const SHARPNESS: f64 = 4.0;

/// What outputs of a batch should be.
pub trait Objective {
    /// Number of samples.
    fn samples(&self) -> usize;
    /// Parameters of its own that are trained too.
    fn vars(&self) -> Vec<Var> {
        Vec::new()
    }
    /// The mean loss of `outputs`, one row for each of `samples`.
    fn loss(&self, outputs: &Tensor, samples: &[u32]) -> Result<Tensor>;
}

/// Loss of blocks' scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loss {
    /// Cross-entropy between the scores' softmax and the shares of importance.
    Softmax,
    /// Binary cross-entropy of being among the strongest.
    Binary,
}

/// Past activity of a sample's blocks; see `ls_hash::Signals`. Samples x blocks each, 255 for 1.
#[derive(Clone, Debug, Default)]
pub struct Past {
    /// The fast mean.
    pub fast: Vec<u8>,
    /// The slow mean.
    pub slow: Vec<u8>,
    /// Active at the last token.
    pub previous: Vec<u8>,
}

impl Past {
    fn signals(&self) -> [&Vec<u8>; 3] {
        [&self.fast, &self.slow, &self.previous]
    }
}

/// Importance of all blocks at each sample.
#[derive(Debug)]
pub struct BlockTargets {
    data: Arc<BlockData>,
    /// Weights of the past's three signals.
    weights: Option<Var>,
}

#[derive(Debug)]
struct BlockData {
    blocks: usize,
    loss: Loss,
    /// Importance, encoded as by `encode_magnitude`; samples x blocks.
    codes: Vec<u8>,
    /// The least code of a sample's strongest blocks.
    least: Vec<u8>,
    past: Option<Past>,
    decoded: [f32; 256],
}

impl BlockTargets {
    /// Of `codes` (samples x blocks, see [`crate::stages::activations::encode_magnitude`]), of whose blocks the share
    /// `target_share` is to be found. With `past`, its signals get weights.
    pub fn new(
        blocks: usize,
        codes: Vec<u8>,
        past: Option<Past>,
        target_share: f64,
        loss: Loss,
    ) -> Result<BlockTargets> {
        let strongest = ((blocks as f64 * target_share).round() as usize).clamp(1, blocks);
        let least = codes.chunks_exact(blocks).map(|codes| least_of(codes, strongest)).collect();
        let weights = past.as_ref().map(|_| Var::from_slice(&[0f32; 3], 3, device::current()));
        let decoded = std::array::from_fn(|code| decode_magnitude(code as u8));
        let data = BlockData { blocks, loss, codes, least, past, decoded };
        Ok(BlockTargets { data: Arc::new(data), weights: weights.transpose()? })
    }

    /// Each block's mean share of a sample's importance.
    #[must_use]
    pub fn shares(&self) -> Vec<f32> {
        let data = &*self.data;
        let mut shares = vec![0f64; data.blocks];
        for codes in data.codes.chunks_exact(data.blocks) {
            let total: f32 = codes.iter().map(|&c| data.decoded[usize::from(c)]).sum();
            for (share, &code) in shares.iter_mut().zip(codes) {
                *share += f64::from(data.decoded[usize::from(code)] / total.max(f32::MIN_POSITIVE));
            }
        }
        let samples = data.least.len().max(1) as f64;
        shares.into_iter().map(|share| (share / samples) as f32).collect()
    }

    /// What scores should begin as: those of a model that knows only how blocks are on average.
    #[must_use]
    pub fn prior(&self) -> Vec<f32> {
        let data = &*self.data;
        match data.loss {
            Loss::Softmax => {
                let blocks = data.blocks as f32;
                self.shares().into_iter().map(|share| (share * blocks + 1e-3).ln()).collect()
            }
            Loss::Binary => {
                let mut counts = vec![0f32; data.blocks];
                for (codes, &least) in data.codes.chunks_exact(data.blocks).zip(&data.least) {
                    for (count, &code) in counts.iter_mut().zip(codes) {
                        *count += f32::from(u8::from(code >= least));
                    }
                }
                let samples = data.least.len() as f32;
                let odds = |count: f32| ((count + 0.5) / (samples - count + 0.5)).ln();
                counts.into_iter().map(odds).collect()
            }
        }
    }

    /// The weights of the past's signals: of the fast mean, the slow mean and the last token.
    pub fn weights(&self) -> Result<Option<[f32; 3]>> {
        let read = |weights: &Var| {
            let weights: Vec<f32> = weights.to_vec1()?;
            Ok(weights.try_into().expect("three weights"))
        };
        self.weights.as_ref().map(read).transpose()
    }
}

/// The code that the strongest `count` have at least.
fn least_of(codes: &[u8], count: usize) -> u8 {
    let mut held = [0usize; 256];
    codes.iter().for_each(|&code| held[usize::from(code)] += 1);
    let mut found = 0;
    let enough = |&code: &usize| {
        found += held[code];
        found >= count
    };
    (0..256).rev().find(enough).unwrap_or(0) as u8
}

impl Objective for BlockTargets {
    fn samples(&self) -> usize {
        self.data.least.len()
    }

    fn vars(&self) -> Vec<Var> {
        self.weights.iter().cloned().collect()
    }

    fn loss(&self, outputs: &Tensor, samples: &[u32]) -> Result<Tensor> {
        let weights = match &self.weights {
            Some(weights) => weights.as_tensor().clone(),
            None => Tensor::zeros(3, DType::F32, outputs.device())?,
        };
        if !outputs.device().is_cpu() {
            return self.data.loss_in_tensors(outputs, &weights, samples);
        }
        let op = BlockLoss {
            data: self.data.clone(),
            samples: samples.to_vec(),
            gradients: Mutex::new(None),
        };
        outputs.apply_op2(&weights, op)
    }
}

/// The loss of a batch. Value and derivatives come in one pass over the outputs.
struct BlockLoss {
    data: Arc<BlockData>,
    samples: Vec<u32>,
    gradients: Mutex<Option<(Vec<f32>, [f32; 3])>>,
}

impl BlockData {
    /// The three signals of a sample, if there are any.
    fn past(&self, sample: usize) -> Option<[&[u8]; 3]> {
        let blocks = self.blocks;
        let of = |signal: &'_ Vec<u8>| -> std::ops::Range<usize> {
            debug_assert_eq!(signal.len(), self.codes.len());
            sample * blocks..(sample + 1) * blocks
        };
        self.past.as_ref().map(|past| past.signals().map(|signal| &signal[of(signal)]))
    }

    /// Turns the scores of a sample into the derivatives of its loss. Returns the loss, if its `value` is wanted, and
    /// the derivatives by the weights.
    fn sample(
        &self,
        sample: usize,
        weights: [f32; 3],
        row: &mut [f32],
        value: bool,
    ) -> (f64, [f32; 3]) {
        let past = self.past(sample);
        if let Some([fast, slow, previous]) = past {
            let [a, b, c] = weights.map(|weight| weight / 255.0);
            for (score, ((&x, &y), &z)) in row.iter_mut().zip(fast.iter().zip(slow).zip(previous)) {
                *score += a * f32::from(x) + b * f32::from(y) + c * f32::from(z);
            }
        }
        let codes = &self.codes[sample * self.blocks..][..self.blocks];
        let loss = match self.loss {
            Loss::Softmax => self.softmax(codes, row),
            Loss::Binary => self.binary(codes, self.least[sample], row, value),
        };
        let along = |signal: &[u8]| {
            row.iter().zip(signal).map(|(g, &x)| g * f32::from(x)).sum::<f32>() / 255.0
        };
        (loss, past.map_or([0.0; 3], |past| past.map(along)))
    }

    /// [`BlockLoss`] by plain operations, where the scores are.
    fn loss_in_tensors(
        &self,
        scores: &Tensor,
        weights: &Tensor,
        samples: &[u32],
    ) -> Result<Tensor> {
        let (batch, blocks, device) = (samples.len(), self.blocks, scores.device());
        let rows = |bytes: &[u8]| {
            let row = |&sample: &u32| &bytes[sample as usize * blocks..][..blocks];
            let rows = samples.iter().map(row).collect::<Vec<_>>().concat();
            Tensor::from_vec(rows, (batch, blocks), device)
        };
        let mut scores = scores.clone();
        for (place, signal) in self.past.iter().flat_map(Past::signals).enumerate() {
            let signal = rows(signal)?.to_dtype(DType::F32)?.affine(1.0 / 255.0, 0.0)?;
            scores = (scores + signal.broadcast_mul(&weights.narrow(0, place, 1)?)?)?;
        }
        let codes = rows(&self.codes)?;
        let decoded = Tensor::from_slice(&self.decoded, 256, device)?;
        // As u32: the largest u8 would be taken for no index.
        let places = codes.flatten_all()?.to_dtype(DType::U32)?;
        let importance = decoded.index_select(&places, 0)?.reshape((batch, blocks))?;
        let column = |of: &dyn Fn(u8) -> f32| {
            let values: Vec<f32> = samples.iter().map(|&s| of(self.least[s as usize])).collect();
            Tensor::from_vec(values, (batch, 1), device)
        };
        match self.loss {
            Loss::Softmax => {
                let total = importance.sum_keepdim(1)?.maximum(f32::MIN_POSITIVE)?;
                let logs = candle_nn::ops::log_softmax(&scores, D::Minus1)?;
                (importance.broadcast_div(&total)? * logs)?
                    .sum_all()?
                    .affine(-1.0 / batch as f64, 0.0)
            }
            Loss::Binary => {
                let edge = column(&|c| self.decoded[usize::from(c)].max(f32::MIN_POSITIVE))?;
                let weight = ((importance.broadcast_div(&edge)? - 1.0)?.abs()? + f64::from(FLOOR))?;
                let least = column(&|c| f32::from(c))?;
                let wanted = codes.to_dtype(DType::F32)?.broadcast_ge(&least)?;
                (cross_entropy(&scores, &wanted.to_dtype(DType::F32)?)? * weight)?.mean_all()
            }
        }
    }

    fn softmax(&self, codes: &[u8], row: &mut [f32]) -> f64 {
        let total: f32 = codes.iter().map(|&c| self.decoded[usize::from(c)]).sum();
        let total = total.max(f32::MIN_POSITIVE);
        let largest = row.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
        let (mut sum, mut gained) = (0f32, 0f32);
        for (score, &code) in row.iter_mut().zip(codes) {
            gained += self.decoded[usize::from(code)] / total * (*score - largest);
            *score = exp(*score - largest);
            sum += *score;
        }
        for (score, &code) in row.iter_mut().zip(codes) {
            *score = *score / sum - self.decoded[usize::from(code)] / total;
        }
        f64::from(sum.ln() - gained)
    }

    fn binary(&self, codes: &[u8], least: u8, row: &mut [f32], value: bool) -> f64 {
        let edge = self.decoded[usize::from(least)].max(f32::MIN_POSITIVE);
        let share = 1.0 / self.blocks as f32;
        // Being wrong about a block costs what is lost by it, and a little by itself.
        let weight = |code: u8| (self.decoded[usize::from(code)] / edge - 1.0).abs() + FLOOR;
        let wanted = |code: u8| f32::from(u8::from(code >= least));
        let mut loss = 0f64;
        if value {
            let of = |(&odds, &code): (&f32, &u8)| {
                let log = (-odds.abs()).exp().ln_1p();
                f64::from(weight(code) * (odds.max(0.0) - odds * wanted(code) + log))
            };
            loss = row.iter().zip(codes).map(of).sum();
        }
        for odds in row.iter_mut() {
            *odds = 1.0 / (1.0 + exp(-*odds));
        }
        for (likely, &code) in row.iter_mut().zip(codes) {
            *likely = weight(code) * (*likely - wanted(code)) * share;
        }
        loss * f64::from(share)
    }
}

/// e^x to seven digits, in operations that loops can do side by side.
fn exp(x: f32) -> f32 {
    let y = x.clamp(-80.0, 80.0) * std::f32::consts::LOG2_E;
    let whole = (y + 12_582_912.0) - 12_582_912.0;
    // 2^r for |r| <= 1/2: the series of e^(r ln 2).
    let r = (y - whole) * std::f32::consts::LN_2;
    let series = 1.0
        + r * (1.0
            + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r / 720.0)))));
    f32::from_bits(((whole as i32 + 127) << 23) as u32) * series
}

impl CustomOp2 for BlockLoss {
    fn name(&self) -> &'static str {
        "loss of scores"
    }

    fn cpu_fwd(
        &self,
        scores: &CpuStorage,
        layout: &Layout,
        weights: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("a loss wants contiguous scores")
        };
        let mut gradients = scores.as_slice::<f32>()?[start..end].to_vec();
        let weights: [f32; 3] = weights.as_slice::<f32>()?[..3].try_into().expect("three");
        let rows = gradients.par_chunks_exact_mut(self.data.blocks).zip(&self.samples);
        let share = 1.0 / self.samples.len() as f32;
        let found: Vec<(f64, [f32; 3])> = rows
            .enumerate()
            .map(|(place, (row, &sample))| {
                let value = place % VALUE_EVERY == 0;
                let mut found = self.data.sample(sample as usize, weights, row, value);
                found.0 *= f64::from(u8::from(value));
                row.iter_mut().for_each(|gradient| *gradient *= share);
                found
            })
            .collect();
        let (mut loss, mut of_weights) = (0f64, [0f32; 3]);
        for (of_sample, along) in found {
            loss += of_sample;
            of_weights.iter_mut().zip(along).for_each(|(sum, along)| *sum += along * share);
        }
        *self.gradients.lock().expect("no thread panicked") = Some((gradients, of_weights));
        let loss = (loss / self.samples.len().div_ceil(VALUE_EVERY) as f64) as f32;
        Ok((CpuStorage::F32(vec![loss]), Shape::from(())))
    }

    fn bwd(
        &self,
        scores: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let taken = self.gradients.lock().expect("no thread panicked").take();
        let Some((of_scores, of_weights)) = taken else {
            candle_core::bail!("a loss is derived once")
        };
        let of_scores = Tensor::from_vec(of_scores, scores.shape(), &Device::Cpu)?;
        let of_weights = Tensor::from_slice(&of_weights, 3, &Device::Cpu)?;
        let scale = f64::from(gradient.to_vec0::<f32>()?);
        if scale == 1.0 {
            return Ok((Some(of_scores), Some(of_weights)));
        }
        Ok((Some((of_scores * scale)?), Some((of_weights * scale)?)))
    }
}

/// The class of each sample, below 2^tau.
#[derive(Clone, Debug)]
pub struct ClassTargets {
    /// Classes.
    pub classes: Vec<u32>,
}

impl Objective for ClassTargets {
    fn samples(&self) -> usize {
        self.classes.len()
    }

    fn loss(&self, margins: &Tensor, samples: &[u32]) -> Result<Tensor> {
        let (batch, tau) = margins.dims2()?;
        let products = (margins.matmul(&patterns(tau, margins.device())?)? * SHARPNESS)?;
        let wanted: Vec<u32> = samples.iter().map(|&s| self.classes[s as usize]).collect();
        let wanted = Tensor::from_vec(wanted, batch, margins.device())?;
        candle_nn::loss::cross_entropy(&products, &wanted)
    }
}

/// The bin of each sample, below 2^tau, whose bits are to be spelled, the most significant first.
#[derive(Clone, Debug)]
pub struct CodeTargets {
    /// Bins.
    pub bins: Vec<u32>,
}

impl Objective for CodeTargets {
    fn samples(&self) -> usize {
        self.bins.len()
    }

    fn loss(&self, margins: &Tensor, samples: &[u32]) -> Result<Tensor> {
        let (batch, tau) = margins.dims2()?;
        let bit = |&s: &u32| {
            let bin = self.bins[s as usize];
            (0..tau).map(move |k| (bin >> (tau - 1 - k) & 1) as f32)
        };
        let wanted: Vec<f32> = samples.iter().flat_map(bit).collect();
        let wanted = Tensor::from_vec(wanted, (batch, tau), margins.device())?;
        cross_entropy(&(margins * SHARPNESS)?, &wanted)?.mean_all()
    }
}

/// ln(1 + e^odds) - odds * wanted, in the form that does not overflow.
fn cross_entropy(odds: &Tensor, wanted: &Tensor) -> Result<Tensor> {
    let rest = (odds.abs()?.neg()?.exp()? + 1.0)?.log()?;
    (odds.relu()? + rest)? - (odds * wanted)?
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Derivatives by differences.
    fn check(loss: Loss) {
        let codes = vec![255, 240, 10, 0, 200, 255, 130, 140, 90, 250];
        let past = Past {
            fast: vec![10, 200, 30, 90, 255, 0, 0, 255, 40, 60],
            slow: vec![100, 20, 30, 190, 55, 70, 30, 25, 140, 60],
            previous: vec![255, 0, 0, 255, 255, 0, 0, 255, 0, 0],
        };
        let targets = BlockTargets::new(5, codes, Some(past), 0.4, loss).unwrap();
        let scores: Vec<f32> = vec![0.3, -0.2, 1.0, -1.1, 0.4];
        let weights = targets.vars()[0].clone();
        weights.set(&Tensor::from_slice(&[0.3f32, -0.4, 0.2], 3, &Device::Cpu).unwrap()).unwrap();
        let value = |scores: &[f32]| {
            let scores = Tensor::from_slice(scores, (1, 5), &Device::Cpu).unwrap();
            f64::from(targets.loss(&scores, &[1]).unwrap().to_vec0::<f32>().unwrap())
        };
        let var = Var::from_slice(&scores, (1, 5), &Device::Cpu).unwrap();
        let found = targets.loss(&var, &[1]).unwrap().backward().unwrap();
        let plain = targets.data.loss_in_tensors(&var, &weights, &[1]).unwrap();
        let (a, b) = (f64::from(plain.to_vec0::<f32>().unwrap()), value(&scores));
        assert!((a - b).abs() < 1e-5 * b, "{loss:?}: {a} {b}");
        let plain = plain.backward().unwrap();
        for var in [var.as_tensor(), weights.as_tensor()] {
            let read = |found: &candle_core::backprop::GradStore| -> Vec<f32> {
                found.get(var).unwrap().flatten_all().unwrap().to_vec1().unwrap()
            };
            let pairs = read(&found).into_iter().zip(read(&plain));
            pairs.for_each(|(a, b)| assert!((a - b).abs() < 1e-5, "{loss:?}: {a} {b}"));
        }
        let of_scores = found.get(&var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (place, &found) in of_scores.iter().enumerate() {
            let moved = |by: f32| {
                let mut scores = scores.clone();
                scores[place] += by;
                value(&scores)
            };
            let wanted = (moved(0.01) - moved(-0.01)) / 0.02;
            assert!((f64::from(found) - wanted).abs() < 1e-4, "{loss:?} {place}: {found} {wanted}");
        }
        let of_weights = found.get(&weights).unwrap().to_vec1::<f32>().unwrap();
        for place in 0..3 {
            let moved = |by: f32| {
                let mut moved = [0.3f32, -0.4, 0.2];
                moved[place] += by;
                weights.set(&Tensor::from_slice(&moved, 3, &Device::Cpu).unwrap()).unwrap();
                value(&scores)
            };
            let wanted = (moved(0.01) - moved(-0.01)) / 0.02;
            assert!((f64::from(of_weights[place]) - wanted).abs() < 1e-4, "{place}");
        }
    }

    #[test]
    fn derivatives_are_those_of_the_loss() {
        check(Loss::Softmax);
        check(Loss::Binary);
    }

    #[test]
    fn derivatives_of_a_batch_are_the_mean_of_its_samples() {
        let codes = vec![255, 240, 10, 0, 200, 255];
        let targets = BlockTargets::new(3, codes, None, 0.4, Loss::Binary).unwrap();
        let of = |scores: &[f32], samples: &[u32]| -> Vec<f32> {
            let var = Var::from_slice(scores, (samples.len(), 3), &Device::Cpu).unwrap();
            let found = targets.loss(&var, samples).unwrap().backward().unwrap();
            found.get(&var).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let (a, b) = ([0.3f32, -0.2, 1.0], [0.1f32, 2.0, -1.0]);
        let apart = [of(&a, &[0]), of(&b, &[1])].concat();
        let together = of(&[a, b].concat(), &[0, 1]);
        assert_eq!(together, apart.iter().map(|x| 0.5 * x).collect::<Vec<_>>());
    }

    #[test]
    fn powers_are_right_to_seven_digits() {
        for i in -4000..4000 {
            let x = i as f32 * 0.0199;
            assert!((exp(x) / x.exp() - 1.0).abs() < 1e-5 * (1.0 + x.abs() / 20.0), "{x}");
        }
        assert!(exp(-1000.0) >= 0.0 && exp(-1000.0) < 1e-30 && exp(1000.0).is_finite());
    }

    #[test]
    fn the_strongest_are_counted_from_the_top() {
        assert_eq!(least_of(&[5, 9, 7, 7, 1], 1), 9);
        assert_eq!(least_of(&[5, 9, 7, 7, 1], 2), 7);
        assert_eq!(least_of(&[5, 9, 7, 7, 1], 3), 7);
        assert_eq!(least_of(&[5, 9, 7, 7, 1], 5), 1);
    }

    #[test]
    fn wrong_bits_cost_more_than_right_ones() {
        let targets = CodeTargets { bins: vec![0b10] };
        let loss = |margins: [f32; 2]| {
            let margins = Tensor::from_slice(&margins, (1, 2), &Device::Cpu).unwrap();
            targets.loss(&margins, &[0]).unwrap().to_vec0::<f32>().unwrap()
        };
        assert!(loss([1.0, -1.0]) < 0.1 && loss([-1.0, 1.0]) > 3.0);
        assert!(loss([1.0, 1.0]) > loss([1.0, -1.0]) && loss([-1.0, -1.0]) > loss([1.0, -1.0]));
        assert!((loss([0.0, 0.0]) - 2f32.ln()).abs() < 1e-6);
        let targets = ClassTargets { classes: vec![0b10] };
        let loss = |margins: [f32; 2]| {
            let margins = Tensor::from_slice(&margins, (1, 2), &Device::Cpu).unwrap();
            targets.loss(&margins, &[0]).unwrap().to_vec0::<f32>().unwrap()
        };
        assert!(loss([1.0, -1.0]) < 0.1 && loss([-1.0, -1.0]) > 3.0);
    }
}
