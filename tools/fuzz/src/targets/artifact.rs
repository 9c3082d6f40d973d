//! The files that `ls-prep` keeps between its stages, and its recipes.

use crate::target::{Scratch, Target};
use ls_prep::artifact::Artifact;
use ls_prep::recipe::Recipe;
use ls_prep::stage::Stage;
use ls_prep::stages::activations::{Activations, ActivationsStage};
use ls_prep::stages::base::{Base, BaseStage};
use ls_prep::stages::embedding::{Embedding, EmbeddingStage};
use ls_prep::stages::guard::Guard;
use ls_prep::stages::placement::{Placement, PlacementStage};
use ls_prep::stages::predictor::{PredictorStage, Predictors};
use ls_prep::stages::prompts::{Prompts, Windows};
use ls_prep::stages::reuse::{Reuse, ReuseStage};
use ls_prep::stages::{mlp, sparsity};

const HEADER_BYTES: usize = 96;
const HEAD_BYTES: usize = 48;
/// More than any corpus has.
const VOCAB_SIZE: u32 = 400;

pub(crate) const ARTIFACT: Target = Target {
    rigid: true,
    parts: |bytes| {
        // Header, description, and then each record's head and content.
        let Some((start, records)) = records(bytes) else { return Vec::new() };
        let contents = records.iter().map(|&(head, end)| head..end);
        [8..HEADER_BYTES, HEADER_BYTES..start].into_iter().chain(contents).collect()
    },
    seal,
    ..Target::new("artifact", "artifacts of ls-prep's stages", |folder| {
        let file = Scratch::new(folder, "artifact.bin");
        Box::new(move |bytes| {
            file.put(bytes, 0);
            let Ok(artifact) = Artifact::open(&file.path) else { return };
            if artifact.verify().is_ok() {
                understand(artifact);
            }
        })
    })
};

/// Reads an artifact as the stages do that are made from it.
fn understand(artifact: Artifact) {
    match artifact.description().stage.as_str() {
        Prompts::NAME => drop(Windows::read(&artifact, VOCAB_SIZE)),
        ActivationsStage::NAME => drop(Activations::new(artifact)),
        EmbeddingStage::NAME => drop(Embedding::new(artifact)),
        PlacementStage::NAME => drop(Placement::read(&artifact)),
        PredictorStage::NAME => drop(Predictors::read(&artifact)),
        BaseStage::NAME => drop(Base::new(artifact)),
        ReuseStage::NAME => drop(Reuse::read(&artifact)),
        "62-mlp" => drop((mlp::read(&artifact), mlp::packed(&artifact, 0))),
        "66-guard" => drop(Guard::read(&artifact)),
        "65-sparsity" => drop(sparsity::prices(&artifact)),
        _ => {}
    }
}

/// Where records start, and of each its head's start and its content's end.
fn records(bytes: &[u8]) -> Option<(usize, Vec<(usize, usize)>)> {
    let text = u32::from_le_bytes(*bytes.get(8..)?.first_chunk()?) as usize;
    let start = HEADER_BYTES.checked_add(text).filter(|&start| start <= bytes.len())?;
    let (mut records, mut at) = (Vec::new(), start);
    while at + HEAD_BYTES <= bytes.len() {
        let len = u64::from_le_bytes(*bytes[at + 8..].first_chunk()?);
        // The last record takes what is there.
        let rest = bytes.len() - at - HEAD_BYTES;
        let end = at + HEAD_BYTES + usize::try_from(len).unwrap_or(rest).min(rest);
        records.push((at, end));
        at = end;
    }
    Some((start, records))
}

/// Hashes of records, of their heads and of the header, and the lengths in it, but for the number of records.
fn seal(bytes: &mut [u8]) {
    let Some((start, records)) = records(bytes) else { return };
    let mut heads = blake3::Hasher::new();
    for &(at, end) in &records {
        let content = at + HEAD_BYTES..end;
        let mut hash = blake3::Hasher::new();
        hash.update(&bytes[at..at + 16]).update(&bytes[content]);
        bytes[at + 16..at + HEAD_BYTES].copy_from_slice(hash.finalize().as_bytes());
        heads.update(&bytes[at..at + HEAD_BYTES]);
    }
    let payload = (bytes.len() - start) as u64;
    bytes[16..24].copy_from_slice(&payload.to_le_bytes());
    bytes[24..32].copy_from_slice(&(records.len() as u64).to_le_bytes());
    bytes[32..64].copy_from_slice(heads.finalize().as_bytes());
    let mut header = blake3::Hasher::new();
    header.update(&bytes[..64]).update(&bytes[HEADER_BYTES..start]);
    bytes[64..HEADER_BYTES].copy_from_slice(header.finalize().as_bytes());
}

pub(crate) const RECIPE: Target = Target {
    words: &[
        "extends",
        "\"quick\"",
        "\"tiny\"",
        "\"full\"",
        "name",
        "seed",
        "[calibration]",
        "[pack]",
        "[base]",
        "[[",
        "]]",
        "= ",
        "[",
        "]",
        "{ a = 1 }",
        "tokens",
        "window",
        "tau",
        "layers",
        "true",
        "nan",
        "inf",
        "-1",
        "1e308",
        "18446744073709551616",
        "'''",
        "\"\"\"",
        "1979-05-27",
        "block_neurons",
        "dtype",
        "\"q4_0\"",
        "a.b.c.d = 1",
    ],
    ..Target::new("recipe", "recipes", |_| {
        Box::new(|bytes| {
            let text = String::from_utf8_lossy(bytes);
            let Ok(recipe) = Recipe::parse(&text, "recipe") else { return };
            let again = Recipe::parse(&recipe.to_toml(), "recipe").expect("a recipe tells itself");
            assert_eq!(again.to_toml(), recipe.to_toml());
        })
    })
};
