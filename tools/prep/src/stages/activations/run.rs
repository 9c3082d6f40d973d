//! The forward that records: layers outside, chunks inside, a few of them side by side; residuals in two files that take
//! turns.

use super::{Chunk, Params, encode_magnitude};
use crate::artifact::RecordId;
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::model::Model;
use crate::model::forward::{Forward, Layer};
use crate::progress::{Phase, Progress};
use crate::stage::side_by_side;
use crate::stages::prompts::Windows;
use half::f16;
use half::slice::HalfFloatSliceExt;
use ls_bundle::checksum;
use ls_bundle::files::File;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What one layer does to a chunk of tokens, all in f32.
struct Tap {
    /// The residuals that enter the FFN; tokens x hidden.
    inputs: Vec<f32>,
    /// Activations of all neurons; tokens x neurons.
    activations: Vec<f32>,
    /// Residuals after each stage; staged tokens x stages x hidden.
    staged: Vec<f32>,
}

/// Residuals of all tokens in a file; tokens x hidden f32. What this process has written is checked when it is read.
struct Residuals {
    file: File,
    path: PathBuf,
    hidden: usize,
    /// By first token: how many tokens were written at once, and their checksum.
    written: Mutex<BTreeMap<u64, (u64, u64)>>,
}

impl Residuals {
    fn open(path: PathBuf, params: &Params) -> Result<Residuals> {
        let io = |source| PrepError::io(&path, source);
        let file = File::create(&path).map_err(io)?;
        let hidden = params.hidden as usize;
        file.set_len(4 * params.tokens * u64::from(params.hidden)).map_err(io)?;
        Ok(Residuals { file, path, hidden, written: Mutex::default() })
    }

    fn written(&self) -> MutexGuard<'_, BTreeMap<u64, (u64, u64)>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A bit may be flipped on its way from the disk, so what fails is read once more.
    fn read(&self, first: u64, tokens: u64) -> Result<Vec<f32>> {
        self.read_once(first, tokens).or_else(|_| self.read_once(first, tokens))
    }

    fn read_once(&self, first: u64, tokens: u64) -> Result<Vec<f32>> {
        let (start, end) = self.whole_parts(first, first + tokens);
        let mut values = vec![0f32; (end - start) as usize * self.hidden];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        let offset = 4 * start * self.hidden as u64;
        let done = self.file.read_exact_at(bytes, offset);
        done.map_err(|source| PrepError::io(&self.path, source))?;
        let parts: Vec<_> =
            self.written().range(start..end).map(|(&part, &written)| (part, written)).collect();
        for (part, (count, sum)) in parts {
            let at = (part - start) as usize * self.hidden;
            let written = &values[at..][..count as usize * self.hidden];
            if checksum::of(bytemuck::cast_slice(written)) != sum {
                let problem =
                    format!("the residuals of tokens from {first} on are not those written");
                return Err(PrepError::corrupt(self.path.display(), problem));
            }
        }
        values.truncate((first + tokens - start) as usize * self.hidden);
        values.drain(..(first - start) as usize * self.hidden);
        Ok(values)
    }

    /// Tokens `first .. end`, and those that were written together with any of them: only wholes can be checked.
    fn whole_parts(&self, first: u64, end: u64) -> (u64, u64) {
        let written = self.written();
        let end_of = |(&part, &(count, _)): (&u64, &(u64, u64))| part + count;
        let before = written.range(..first).next_back().filter(|&part| end_of(part) > first);
        let last = written.range(..end).next_back().map_or(end, end_of);
        (before.map_or(first, |(&part, _)| part), end.max(last))
    }

    fn write(&self, first: u64, values: &[f32]) -> Result<()> {
        let offset = 4 * first * self.hidden as u64;
        let bytes = bytemuck::cast_slice(values);
        let done = self.file.write_all_at(bytes, offset);
        done.map_err(|source| PrepError::io(&self.path, source))?;
        let count = (values.len() / self.hidden) as u64;
        let mut written = self.written();
        // Parts of it may have been written one by one before.
        let before: Vec<u64> =
            written.range(first..first + count).map(|(&start, _)| start).collect();
        for start in before {
            written.remove(&start);
        }
        written.insert(first, (count, checksum::of(bytes)));
        Ok(())
    }
}

fn hash_state(values: &[f32]) -> [u8; 32] {
    *blake3::hash(bytemuck::cast_slice(values)).as_bytes()
}

struct Run<'a> {
    params: &'a Params,
    /// Layer n reads the file n mod 2 and writes the other.
    residuals: [Residuals; 2],
}

pub(super) fn run(
    model: &Model,
    windows: &Windows,
    params: &Params,
    journal: &mut Journal,
    progress: &mut dyn Progress,
) -> Result<()> {
    let open = |name| Residuals::open(journal.scratch(name), params);
    let run = Run { params, residuals: [open("even")?, open("odd")?] };
    let forward = Forward::new(model, params.window)?;
    let recorded = journal.description().units_held();
    let chunk_bytes = params.chunk_bytes(&model.config);
    let (mut layer, mut chunk) = run.resume(journal)?.unwrap_or((0, 0));
    progress.begin(Phase::Forward, params.tokens * u64::from(recorded.end));
    progress.advance(params.tokens * u64::from(layer));
    if layer == 0 {
        forward.embed(&windows.tokens, |token, row| run.residuals[0].write(token as u64, row))?;
    }
    while layer < recorded.end {
        let weights = forward.layer(layer as u16)?;
        let ids = (std::mem::take(&mut chunk)..params.chunks())
            .map(|chunk| RecordId::new(layer, chunk))
            .map(|id| (id, recorded.contains(&layer) && !journal.contains(id)));
        let ids: Vec<(RecordId, bool)> = ids.collect();
        let push = |(id, wanted)| run.push(&weights, id, wanted);
        side_by_side(&ids, chunk_bytes, push, |(id, _), record| {
            record.map_or(Ok(()), |record| journal.append(id, &record))?;
            progress.advance(params.tokens_of(id.part));
            Ok(())
        })?;
        layer += 1;
    }
    let check = RecordId::new(params.layers - 1, params.chunks());
    if recorded.end == params.layers && !journal.contains(check) {
        let nll = run.check(&forward, windows)?;
        let bytes: Vec<u8> = nll.iter().flat_map(|nll| nll.to_le_bytes()).collect();
        journal.append(check, &bytes)?;
    }
    Ok(())
}

impl Run<'_> {
    fn first_token(&self, chunk: u32) -> u64 {
        u64::from(chunk) * u64::from(self.params.chunk_tokens)
    }

    /// Pushes a chunk through a layer; the record of what it does, if that is `wanted`.
    fn push(&self, layer: &Layer<'_>, id: RecordId, wanted: bool) -> Result<Option<Vec<u8>>> {
        let (first, tokens) = (self.first_token(id.part), self.params.tokens_of(id.part));
        let mut x = self.residuals[id.unit as usize % 2].read(first, tokens)?;
        let output = &self.residuals[(id.unit as usize + 1) % 2];
        let tap = if wanted {
            Some(tap(layer, self.params, &mut x)?)
        } else {
            layer.attend(&mut x)?;
            let activations = layer.activations(layer.ffn_input(&x))?;
            add(&mut x, &layer.ffn_output(activations)?);
            None
        };
        output.write(first, &x)?;
        Ok(tap.map(|tap| encode(self.params, &tap, hash_state(&x))))
    }

    /// Where to go on: the layer and chunk behind the last record, if the residuals there belong to the records.
    fn resume(&self, journal: &Journal) -> Result<Option<(u32, u32)>> {
        let Some(last) = journal.last() else { return Ok(None) };
        let chunks = self.params.chunks();
        let (layer, next) = (last.unit, (last.part + 1).min(chunks));
        let first_recorded = journal.description().range.0;
        // Behind `layer` for the chunks done, before it for the others, which the layer before has recorded.
        for chunk in 0..chunks {
            let from = if chunk < next { Some(layer) } else { layer.checked_sub(1) };
            let Some(from) = from else { return Ok(Some((0, next))) };
            if from < first_recorded {
                return Ok(None);
            }
            let content = journal.read(RecordId::new(from, chunk))?;
            let Some(record) = Chunk::parse(self.params, chunk, &content) else { return Ok(None) };
            let file = &self.residuals[(from as usize + 1) % 2];
            let x = file.read(self.first_token(chunk), self.params.tokens_of(chunk))?;
            if hash_state(&x) != *record.state() {
                return Ok(None);
            }
        }
        Ok(Some(if next == chunks { (layer + 1, 0) } else { (layer, next) }))
    }

    /// Likelihoods of the tokens that are checked, from the residuals behind the last layer.
    fn check(&self, forward: &Forward<'_>, windows: &Windows) -> Result<Vec<f32>> {
        let (window, hidden) = (self.params.window as usize, self.params.hidden as usize);
        let file = &self.residuals[self.params.layers as usize % 2];
        let mut all = Vec::new();
        for first in (0..self.params.check_tokens).step_by(self.params.chunk_tokens as usize) {
            let tokens = u64::from(self.params.chunk_tokens).min(self.params.check_tokens - first);
            let x = file.read(first, tokens)?;
            let ids = &windows.tokens[first as usize..][..tokens as usize];
            let rows = x.chunks_exact(window * hidden);
            let x: Vec<f32> = rows.flat_map(|x| &x[..(window - 1) * hidden]).copied().collect();
            let targets: Vec<u32> =
                ids.chunks_exact(window).flat_map(|ids| &ids[1..]).copied().collect();
            all.extend(forward.nll(&x, &targets)?);
        }
        Ok(all)
    }
}

/// Pushes the residuals `x` through a layer and keeps what is to be recorded.
fn tap(layer: &Layer<'_>, params: &Params, x: &mut [f32]) -> Result<Tap> {
    layer.attend(x)?;
    let inputs = x.to_vec();
    let activations = layer.activations(layer.ffn_input(x))?;
    let staged = stages(layer, params, x, &activations)?;
    add(x, &layer.ffn_output(activations.clone())?);
    Ok(Tap { inputs, activations, staged })
}

/// The residuals of the staged tokens after each stage, neurons of largest magnitude first.
fn stages(layer: &Layer<'_>, params: &Params, x: &[f32], activations: &[f32]) -> Result<Vec<f32>> {
    let (hidden, neurons) = (params.hidden as usize, params.neurons as usize);
    let (stages, every) = (params.stages as usize, params.stage_every as usize);
    let staged: Vec<usize> =
        (0..x.len() / hidden / every).map(|index| (index + 1) * every - 1).collect();
    let row = |token: usize| &activations[token * neurons..][..neurons];
    let order = |&token: &usize| -> Vec<u32> {
        let row = row(token);
        let mut order: Vec<u32> = (0..params.neurons).collect();
        // Equal magnitudes by number, so that the order is one.
        order.sort_unstable_by(|&a, &b| {
            let (x, y) = (row[a as usize].abs(), row[b as usize].abs());
            y.total_cmp(&x).then(a.cmp(&b))
        });
        order
    };
    let orders: Vec<Vec<u32>> = staged.par_iter().map(order).collect();
    let mut sums: Vec<f32> =
        staged.iter().flat_map(|&token| &x[token * hidden..][..hidden]).copied().collect();
    let mut out = vec![0.0; staged.len() * stages * hidden];
    for stage in 0..stages {
        let ranks = params.staged_neurons(stage as u32)..params.staged_neurons(stage as u32 + 1);
        let mut masked = vec![0.0; staged.len() * neurons];
        for ((masked, order), &token) in masked.chunks_exact_mut(neurons).zip(&orders).zip(&staged)
        {
            for &neuron in &order[ranks.clone()] {
                masked[neuron as usize] = row(token)[neuron as usize];
            }
        }
        if !staged.is_empty() {
            add(&mut sums, &layer.ffn_output(masked)?);
        }
        for (index, sum) in sums.chunks_exact(hidden).enumerate() {
            out[(index * stages + stage) * hidden..][..hidden].copy_from_slice(sum);
        }
    }
    Ok(out)
}

/// The record of a chunk.
fn encode(params: &Params, tap: &Tap, state: [u8; 32]) -> Vec<u8> {
    let (hidden, neurons) = (params.hidden as usize, params.neurons as usize);
    let tokens = tap.inputs.len() / hidden;
    let mut record = Vec::with_capacity(params.record_bytes(tokens as u64) as usize);
    record.extend(state);
    push_halves(&mut record, &tap.inputs);
    let largest = |row: &[f32]| row.iter().fold(0f32, |m, x| m.max(x.abs()));
    let scales: Vec<f32> = tap.activations.par_chunks_exact(neurons).map(largest).collect();
    record.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
    let mut codes = vec![0u8; tap.activations.len()];
    let rows = codes.par_chunks_exact_mut(neurons).zip(tap.activations.par_chunks_exact(neurons));
    rows.zip(&scales).for_each(|((codes, row), &scale)| {
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        for (code, x) in codes.iter_mut().zip(row) {
            *code = encode_magnitude(x.abs() * inverse);
        }
    });
    record.extend(codes);
    push_halves(&mut record, &tap.staged);
    assert_eq!(record.len() as u64, params.record_bytes(tokens as u64));
    record
}

/// Appends `values` in half precision; what is beyond its range becomes the largest that is within.
fn push_halves(record: &mut Vec<u8>, values: &[f32]) {
    let limit = f16::MAX.to_f32();
    let clipped: Vec<f32> = values.iter().map(|x| x.clamp(-limit, limit)).collect();
    let mut halves = vec![f16::ZERO; clipped.len()];
    halves.convert_from_f32_slice(&clipped);
    record.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
