//! The suite that every backend passes: tiny random models, driven exactly as the engine drives a backend.
//!
//! A backend's tests call [`check`] with a way to make the backend. What is checked: logits and log-likelihoods
//! against [`reference`](crate::reference), and, bit for bit, that results depend neither on how weights are cut into
//! parts, nor on the number of threads, nor on how a prompt is split into passes, nor on what a rewound cache held.
//! [`check_base`] does the same for FFNs that run in part, beside a low-bit base.
//! Every function panics at the first deviation and names the model and the seed.

mod base;
mod model;
use base::Seen;
pub use base::{Order, Sparse, TinyBase, base_models, check_base};
pub use model::{Rng, TinyModel, build, models};

use crate::reference::ReferenceState;
use crate::{
    ComputeBackend, KvDType, MatrixRows, NeuronBlocks, Outputs, Pass, Projection, ProjectionPart,
};
use ls_bundle::ids::LayerId;
use ls_bundle::model::{DType, MatrixExtent, ModelConfig, Vectors};

/// Largest accepted |a - b|^2 / |b|^2 of logits, where b is the reference with an f16 cache. A cached number next to a
/// rounding boundary may fall to the other side, which in so small a model costs up to 1e-7; wrong arithmetic, 1e-4.
pub const LOGITS_ERROR_MAX: f64 = 1e-6;
/// The same for decode with Q8_0 weights, where activations may be rounded to eight bits for integer products: three
/// times what was seen. In so small a model the errors of a few groups of 32 do not cancel.
pub const DECODE_ERROR_MAX_Q8_0: f64 = 8e-3;
/// The same for Q4_0 weights.
pub const DECODE_ERROR_MAX_Q4_0: f64 = 7e-3;
/// The same for decode beside a base, whose rows are multiplied with such activations too: three times what was seen.
pub const DECODE_ERROR_MAX_BASE: f64 = 4e-4;
/// Largest accepted |a - b|^2 / |b|^2 of scores beside a base: three times what was seen.
pub const SCORES_ERROR_MAX: f64 = 1.2e-3;
/// Added to all of these with a cache in Q8_0: three times what was seen.
pub const KV_ERROR_MAX_Q8_0: f64 = 3e-3;
/// Largest accepted difference of a negative log-likelihood, nats, to the one from the backend's own logits.
pub const NLL_ERROR_MAX: f32 = 1e-4;

/// Tokens that are decoded where runs are compared with each other.
const DECODED: usize = 20;

/// How to make a backend.
#[derive(Clone, Debug)]
pub struct Setup<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// Its small vectors.
    pub vectors: Vectors,
    /// Tokens that the KV cache must hold.
    pub context: u32,
    /// Most tokens of a pass.
    pub pass_tokens: u32,
    /// Most scored tokens of a pass.
    pub scored_tokens: u32,
    /// Number of threads.
    pub threads: usize,
    /// Format of the KV cache.
    pub kv_cache: KvDType,
}

/// How weights are cut into parts.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Rows of a dense part.
    pub rows: u32,
    /// Blocks of an FFN part.
    pub blocks: u32,
    /// Rows of a part of the head; a multiple of 64.
    pub head_rows: u32,
    /// Whether all parts of q, k and v come in one call.
    pub together: bool,
}

impl Cut {
    /// Everything in one piece.
    pub const WHOLE: Cut =
        Cut { rows: u32::MAX, blocks: u32::MAX, head_rows: u32::MAX, together: true };
}

/// Runs the whole suite on `model`.
pub fn check<B: ComputeBackend>(model: &TinyModel, make: &dyn Fn(Setup<'_>) -> B) {
    decode_matches_reference(model, make);
    prefill_matches_reference(model, make);
    cuts_do_not_matter(model, make);
    threads_do_not_matter(model, make);
    splits_do_not_matter(model, make);
    scores_are_log_softmax(model, make);
    rewinding_forgets(model, make);
}

/// A backend and the model that it is driven through.
#[derive(Debug)]
pub struct Driver<'a, B> {
    model: &'a TinyModel,
    backend: B,
    cut: Cut,
    /// How decode runs FFNs, where not all of them; and what it has seen.
    sparse: Option<Sparse<'a>>,
    seen: Seen,
}

impl<'a, B: ComputeBackend> Driver<'a, B> {
    /// Makes the backend, large enough for all of the model's tokens in one scored pass.
    pub fn new(
        model: &'a TinyModel,
        make: &dyn Fn(Setup<'_>) -> B,
        threads: usize,
        cut: Cut,
    ) -> Self {
        let tokens = model.tokens.len() as u32;
        let backend = make(Setup {
            config: &model.config,
            vectors: model.vectors.clone(),
            context: tokens,
            pass_tokens: tokens,
            scored_tokens: tokens,
            threads,
            kv_cache: model.kv_cache,
        });
        Driver { model, backend, cut, sparse: None, seen: Seen::default() }
    }

    /// Makes decode run some of the neurons.
    #[must_use]
    pub fn with(self, sparse: Sparse<'a>) -> Self {
        Driver { sparse: Some(sparse), ..self }
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// One pass through all layers and, if anything is asked for, the head.
    pub fn pass(
        &mut self,
        first_position: u32,
        tokens: &[u32],
        outputs: Outputs<'_>,
        decode: bool,
    ) {
        let model = self.model;
        let count = tokens.len() as u32;
        self.backend.begin(Pass { first_position, tokens: count, outputs, decode });
        for (index, &token) in tokens.iter().enumerate() {
            let row = model.rows(&model.map.embedding, token, 1);
            self.backend.embed(index as u32, row);
        }
        for layer in model.config.layer_ids() {
            self.layer(layer, decode);
        }
        if outputs != Outputs::None {
            self.backend.head_input();
            let head = model.map.head.as_ref().unwrap_or(&model.map.embedding);
            for (first, rows) in pieces(head.rows, self.cut.head_rows) {
                self.backend.head(&model.rows(head, first, rows));
            }
        }
    }

    fn layer(&mut self, layer: LayerId, decode: bool) {
        let model = self.model;
        let extents = &model.map.layers[layer.index()];
        let parts_of = |projection: Projection, extent: &MatrixExtent, cut: Cut| {
            pieces(extent.rows, cut.rows)
                .map(|(first, rows)| ProjectionPart {
                    projection,
                    rows: model.rows(extent, first, rows),
                })
                .collect::<Vec<_>>()
        };
        self.backend.attn_input(layer);
        let qkv: Vec<_> = [
            parts_of(Projection::Query, &extents.q_proj, self.cut),
            parts_of(Projection::Key, &extents.k_proj, self.cut),
            parts_of(Projection::Value, &extents.v_proj, self.cut),
        ]
        .concat();
        let calls = if self.cut.together { qkv.len() } else { 1 };
        for parts in qkv.chunks(calls) {
            self.backend.project(layer, parts);
        }
        self.backend.attend(layer);
        for part in parts_of(Projection::Output, &extents.o_proj, self.cut) {
            self.backend.project(layer, &[part]);
        }
        self.backend.mlp_input(layer);
        match self.sparse.filter(|_| decode) {
            Some(sparse) => sparse.run(model, &mut self.backend, layer, &mut self.seen),
            None => {
                for (first, blocks) in pieces(extents.ffn.blocks(), self.cut.blocks) {
                    let blocks = model.neuron_blocks(layer, first, blocks);
                    self.backend.mlp(layer, &blocks);
                }
            }
        }
        self.backend.mlp_output(layer);
    }

    /// Decodes all of the model's tokens; logits of each, one behind the other.
    fn decode_all(&mut self) -> Vec<f32> {
        self.decode_from(0)
    }

    /// Prefills all of the model's tokens but the last [`DECODED`] and decodes these.
    fn decode_last(&mut self) -> Vec<f32> {
        let tokens = &self.model.tokens;
        let first = tokens.len().saturating_sub(DECODED).max(1);
        self.pass(0, &tokens[..first], Outputs::None, false);
        self.decode_from(first)
    }

    fn decode_from(&mut self, first: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        for (position, token) in self.model.tokens.iter().enumerate().skip(first) {
            let token = std::slice::from_ref(token);
            self.pass(position as u32, token, Outputs::LastLogits, true);
            logits.extend_from_slice(self.backend.logits());
        }
        logits
    }

    /// Scores all of the model's tokens but the last in passes of the given sizes (the last one repeats).
    fn score_all(&mut self, sizes: &[usize]) -> Vec<f32> {
        let tokens = &self.model.tokens;
        let mut sizes = sizes.iter().copied();
        let mut size = 1;
        let (mut position, mut nll) = (0, Vec::new());
        while position + 1 < tokens.len() {
            size = sizes.next().unwrap_or(size);
            let end = (position + size).min(tokens.len() - 1);
            let outputs = Outputs::Score { first: 0, targets: &tokens[position + 1..=end] };
            self.pass(position as u32, &tokens[position..end], outputs, false);
            nll.extend_from_slice(self.backend.nll());
            position = end;
        }
        nll
    }
}

/// Decode logits equal the reference's within the constants of the model's number formats.
pub fn decode_matches_reference<B: ComputeBackend>(
    model: &TinyModel,
    make: &dyn Fn(Setup<'_>) -> B,
) {
    let logits = Driver::new(model, make, 2, Cut::WHOLE).decode_all();
    let want = reference_logits(model);
    assert_near(model, "decode", &logits, &want, decode_error_max(model));
}

/// Logits after prompts of many lengths equal the reference's, and decoding goes on from there.
pub fn prefill_matches_reference<B: ComputeBackend>(
    model: &TinyModel,
    make: &dyn Fn(Setup<'_>) -> B,
) {
    let want = reference_logits(model);
    let vocab = model.config.vocab_size as usize;
    let tokens = &model.tokens;
    let mut driver = Driver::new(model, make, 2, Cut::WHOLE);
    for prompt in [1, 2, 5, 6, 7, 17, tokens.len() - 1] {
        driver.pass(0, &tokens[..prompt], Outputs::LastLogits, false);
        let expected = &want[(prompt - 1) * vocab..][..vocab];
        assert_near(model, "prefill", driver.backend.logits(), expected, prefill_error_max(model));
        driver.pass(prompt as u32, &tokens[prompt..=prompt], Outputs::LastLogits, true);
        let expected = &want[prompt * vocab..][..vocab];
        let error_max = decode_error_max(model);
        assert_near(model, "decode after prefill", driver.backend.logits(), expected, error_max);
    }
}

/// Decode and prefill give the same bits however weights are cut.
pub fn cuts_do_not_matter<B: ComputeBackend>(model: &TinyModel, make: &dyn Fn(Setup<'_>) -> B) {
    let results = |cut: Cut| {
        let mut driver = Driver::new(model, make, 2, cut);
        let decoded = driver.decode_last();
        (decoded, driver.score_all(&[usize::MAX / 2]))
    };
    let whole = results(Cut::WHOLE);
    for cut in [
        Cut { rows: 1, blocks: 1, head_rows: 64, together: false },
        Cut { rows: 7, blocks: 5, head_rows: 128, together: true },
        Cut { rows: 33, blocks: 13, head_rows: 64, together: false },
    ] {
        let cut_up = results(cut);
        assert_same_bits(model, &format!("decode, {cut:?}"), &cut_up.0, &whole.0);
        assert_same_bits(model, &format!("scores, {cut:?}"), &cut_up.1, &whole.1);
    }
}

/// Decode and prefill give the same bits with any number of threads.
pub fn threads_do_not_matter<B: ComputeBackend>(model: &TinyModel, make: &dyn Fn(Setup<'_>) -> B) {
    let results = |threads| {
        let mut driver = Driver::new(model, make, threads, Cut::WHOLE);
        let decoded = driver.decode_last();
        (decoded, driver.score_all(&[usize::MAX / 2]))
    };
    let one = results(1);
    for threads in [2, 3, 5] {
        let many = results(threads);
        assert_same_bits(model, &format!("decode, {threads} threads"), &many.0, &one.0);
        assert_same_bits(model, &format!("scores, {threads} threads"), &many.1, &one.1);
    }
}

/// A prompt gives the same bits however it is split into passes.
pub fn splits_do_not_matter<B: ComputeBackend>(model: &TinyModel, make: &dyn Fn(Setup<'_>) -> B) {
    let score = |sizes: &[usize]| Driver::new(model, make, 2, Cut::WHOLE).score_all(sizes);
    let whole = score(&[usize::MAX / 2]);
    for sizes in [&[1][..], &[2, 3], &[7], &[13, 1, 64]] {
        let split = score(sizes);
        assert_same_bits(model, &format!("scores of passes of {sizes:?}"), &split, &whole);
    }
    let last = |sizes: &[usize]| {
        let mut driver = Driver::new(model, make, 2, Cut::WHOLE);
        let end = model.tokens.len() - 1;
        driver.score_all(sizes);
        driver.pass(end as u32, &model.tokens[end..], Outputs::LastLogits, false);
        driver.backend.logits().to_vec()
    };
    assert_same_bits(model, "last logits of a split prompt", &last(&[5, 11]), &last(&[64]));
}

/// The negative log-likelihood of a target is that of the softmax of the logits; scoring part of a pass gives part
/// of the scores.
pub fn scores_are_log_softmax<B: ComputeBackend>(model: &TinyModel, make: &dyn Fn(Setup<'_>) -> B) {
    let tokens = &model.tokens;
    let mut driver = Driver::new(model, make, 2, Cut::WHOLE);
    let nll = driver.score_all(&[usize::MAX / 2]);
    for (index, &nll) in nll.iter().enumerate().step_by(11) {
        driver.pass(0, &tokens[..=index], Outputs::LastLogits, false);
        let logits = driver.backend.logits();
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        let want = sum.ln() as f32 + max - logits[tokens[index + 1] as usize];
        let context = format!("{}: nll {index} is {nll}, its logits say {want}", model.label());
        assert!((nll - want).abs() <= NLL_ERROR_MAX, "{context}");
    }
    let first = 3;
    let outputs = Outputs::Score { first, targets: &tokens[4..9] };
    driver.pass(0, &tokens[..tokens.len() - 1], outputs, false);
    assert_same_bits(model, "scores in the middle", driver.backend.nll(), &nll[3..8]);
}

/// A pass that starts before the end of the cache forgets what lies behind.
pub fn rewinding_forgets<B: ComputeBackend>(model: &TinyModel, make: &dyn Fn(Setup<'_>) -> B) {
    let tokens = &model.tokens;
    let kept = 5;
    let other: Vec<u32> = tokens[kept..].iter().rev().copied().collect();
    let finish = |driver: &mut Driver<'_, B>| {
        driver.pass(kept as u32, &other[..7], Outputs::None, false);
        driver.pass(kept as u32 + 7, &other[7..8], Outputs::LastLogits, true);
        driver.backend.logits().to_vec()
    };
    let mut fresh = Driver::new(model, make, 2, Cut::WHOLE);
    fresh.pass(0, &tokens[..kept], Outputs::None, false);
    let mut rewound = Driver::new(model, make, 2, Cut::WHOLE);
    rewound.pass(0, &tokens[..tokens.len() - 1], Outputs::LastLogits, false);
    rewound.pass(0, &tokens[..kept], Outputs::None, false);
    rewound.pass(kept as u32, &tokens[kept..], Outputs::None, false);
    assert_same_bits(model, "rewound cache", &finish(&mut rewound), &finish(&mut fresh));
}

/// The reference's logits of all of the model's tokens.
fn reference_logits(model: &TinyModel) -> Vec<f32> {
    let mut state = ReferenceState::with_f16_cache(&model.config);
    let positions = model.tokens.iter().enumerate();
    positions.flat_map(|(p, &t)| model.reference.forward(&mut state, t, p as u32)).collect()
}

/// `0 .. total` in pieces of `size` (the last may be smaller) as (first, count).
fn pieces(total: u32, size: u32) -> impl Iterator<Item = (u32, u32)> {
    let size = size.min(total);
    (0..total).step_by(size as usize).map(move |first| (first, size.min(total - first)))
}

fn decode_error_max(model: &TinyModel) -> f64 {
    prefill_error_max(model)
        + match model.map.embedding.dtype {
            DType::F16 => 0.0,
            DType::Q8_0 => DECODE_ERROR_MAX_Q8_0,
            DType::Q4_0 => DECODE_ERROR_MAX_Q4_0,
        }
}

fn prefill_error_max(model: &TinyModel) -> f64 {
    LOGITS_ERROR_MAX
        + match model.kv_cache {
            KvDType::F16 => 0.0,
            KvDType::Q8_0 => KV_ERROR_MAX_Q8_0,
        }
}

fn assert_near(model: &TinyModel, what: &str, got: &[f32], want: &[f32], error_max: f64) {
    assert_eq!(got.len(), want.len(), "{}: {what}: number of logits", model.label());
    let difference: f64 = got.iter().zip(want).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let error = difference / want.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>();
    // Written so that NaN fails.
    assert!(error <= error_max, "{}: {what}: error {error:e}", model.label());
}

fn assert_same_bits(model: &TinyModel, what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{}: {what}: number of results", model.label());
    let differs = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits());
    if let Some(index) = differs {
        let (got, want) = (got[index], want[index]);
        panic!("{}: {what}: result {index} is {got:e}, not {want:e}", model.label());
    }
}

impl TinyModel {
    /// Rows of a matrix of this model.
    #[must_use]
    pub fn rows(&self, matrix: &MatrixExtent, first: u32, rows: u32) -> MatrixRows<'_> {
        let extent = matrix.rows_extent(first, rows);
        MatrixRows::new(matrix, first, rows, &self.image[extent.offset as usize..])
    }

    /// Blocks of a layer's FFN.
    #[must_use]
    pub fn neuron_blocks(&self, layer: LayerId, first: u32, blocks: u32) -> NeuronBlocks<'_> {
        let ffn = &self.map.layers[layer.index()].ffn;
        let (_, extent) = ffn.block(first);
        NeuronBlocks::new(ffn, first, blocks, &self.image[extent.offset as usize..])
    }
}
