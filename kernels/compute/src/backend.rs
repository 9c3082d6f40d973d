//! [`ComputeBackend`] and what it is given.

use crate::base::{BaseNeurons, BaseTables};
use ls_bundle::ids::LayerId;
use ls_bundle::model::{DType, FfnExtent, MatrixExtent};

/// Consecutive rows of a dense matrix, wherever they are in memory.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRows<'a> {
    /// `rows * dtype.row_bytes(cols)` bytes; aligned to 64 when `first_row` is the first row of a tile.
    pub bytes: &'a [u8],
    /// Number format.
    pub dtype: DType,
    /// Input width.
    pub cols: u32,
    /// Index of the first row in the whole matrix.
    pub first_row: u32,
    /// Number of rows.
    pub rows: u32,
}

impl<'a> MatrixRows<'a> {
    /// Rows `first_row .. first_row + rows` of `matrix`, whose bytes start at `bytes[0]`. Panics if `bytes` is short.
    #[must_use]
    pub fn new(matrix: &MatrixExtent, first_row: u32, rows: u32, bytes: &'a [u8]) -> Self {
        let len =
            usize::try_from(u64::from(rows) * matrix.row_bytes()).expect("rows fit in memory");
        let bytes = &bytes[..len];
        MatrixRows { bytes, dtype: matrix.dtype, cols: matrix.cols, first_row, rows }
    }
}

/// Consecutive FFN blocks of one layer, wherever they are in memory.
#[derive(Clone, Copy, Debug)]
pub struct NeuronBlocks<'a> {
    /// The blocks, `block_stride` bytes each, the first aligned to 64.
    pub bytes: &'a [u8],
    /// Number format of gate, up and down rows.
    pub dtype: DType,
    /// Weights of a row.
    pub hidden: u32,
    /// Index (in file order) of the first neuron in its layer; a multiple of `block_neurons`.
    pub first_neuron: u32,
    /// Number of neurons; the last block may hold fewer than `block_neurons`.
    pub neurons: u32,
    /// Neurons of a block.
    pub block_neurons: u32,
    /// Distance between blocks, bytes.
    pub block_stride: usize,
}

impl<'a> NeuronBlocks<'a> {
    /// Blocks `first_block .. first_block + blocks` of `ffn`, whose bytes start at `bytes[0]`.
    /// Panics if `bytes` is short.
    #[must_use]
    pub fn new(ffn: &FfnExtent, first_block: u32, blocks: u32, bytes: &'a [u8]) -> Self {
        let block_stride = usize::try_from(ffn.block_stride()).expect("a block fits in memory");
        let first_neuron = first_block * ffn.block_neurons;
        NeuronBlocks {
            bytes: &bytes[..blocks as usize * block_stride],
            dtype: ffn.dtype,
            hidden: ffn.hidden,
            first_neuron,
            neurons: (blocks * ffn.block_neurons).min(ffn.neurons - first_neuron),
            block_neurons: ffn.block_neurons,
            block_stride,
        }
    }

    /// Bytes of neuron `index` (counted from the first one here): gate row, up row, down column.
    #[must_use]
    pub fn neuron(&self, index: u32) -> &'a [u8] {
        let len = 3 * self.dtype.row_bytes(self.hidden) as usize;
        let start = (index / self.block_neurons) as usize * self.block_stride
            + (index % self.block_neurons) as usize * len;
        &self.bytes[start..start + len]
    }
}

/// The shape of blocks, for kernels that take them from several places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpShape {
    /// Number format of all three rows.
    pub dtype: DType,
    /// Weights of a row.
    pub hidden: u32,
    /// Neurons of a block.
    pub block_neurons: u32,
    /// Bytes from a block to the next, a multiple of 64.
    pub block_stride: u32,
}

impl MlpShape {
    /// That of a layer's blocks.
    #[must_use]
    pub fn of(ffn: &FfnExtent) -> MlpShape {
        let block_stride = u32::try_from(ffn.block_stride()).expect("a block of a few megabytes");
        let FfnExtent { dtype, hidden, block_neurons, .. } = *ffn;
        MlpShape { dtype, hidden, block_neurons, block_stride }
    }
}

/// The dense matrices of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// q_proj: query_width x hidden.
    Query,
    /// k_proj: kv_width x hidden.
    Key,
    /// v_proj: kv_width x hidden.
    Value,
    /// o_proj: hidden x query_width; its result is added to the residual.
    Output,
}

/// Some rows of one of a layer's dense matrices.
#[derive(Clone, Copy, Debug)]
pub struct ProjectionPart<'a> {
    /// Which matrix.
    pub projection: Projection,
    /// Which rows.
    pub rows: MatrixRows<'a>,
}

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDType {
    /// Half precision.
    #[default]
    F16,
    /// Groups of 32 with a scale, as weights in Q8_0: about half the bytes. Heads are a multiple of 32 wide.
    Q8_0,
}

impl KvDType {
    /// The format of one head's key or value at one position: a row of head_dim numbers.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            KvDType::F16 => DType::F16,
            KvDType::Q8_0 => DType::Q8_0,
        }
    }
}

/// What a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outputs<'a> {
    /// Nothing: the tokens only enter the KV cache (all but the last pass of a long prompt).
    None,
    /// Logits of the last token.
    LastLogits,
    /// Negative log-likelihoods: token `first + i` of the pass is asked for `targets[i]`.
    Score {
        /// Index in the pass of the first scored token.
        first: u32,
        /// The token that should follow each scored token.
        targets: &'a [u32],
    },
}

/// One walk through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass<'a> {
    /// Position of the first token; the KV cache holds exactly the positions before it (what lies behind is dropped).
    pub first_position: u32,
    /// Number of tokens, 1 ..= the backend's `pass_tokens`.
    pub tokens: u32,
    /// What comes out.
    pub outputs: Outputs<'a>,
    /// True: decode kernels (one token, GEMV). False: prefill kernels (GEMM), which give a token the same result
    /// whatever the other tokens of the pass are.
    pub decode: bool,
}

/// The arithmetic of one model on one device. See the crate's documentation for the order of calls.
///
/// Calls must not fail and must not allocate: everything is sized and allocated when the backend is made.
pub trait ComputeBackend: Send {
    /// Announces bytes that stay as they are, where they are, until the backend is dropped: a backend with memory of its
    /// own copies them there, and recognises parts of them by their address in later calls. They start at a multiple of 64
    /// in the bundle. Before the first pass only.
    /// Whether it has: false also if there is no room, and then the bytes are copied whenever a call brings them.
    fn keep(&mut self, bytes: &[u8]) -> bool {
        let _ = bytes;
        false
    }
    /// Announces memory in which blocks of decode will come and go: slots of `slot_bytes`, each with one block of these at a
    /// time, which starts at a multiple of 64 of the slot. The memory stays until the backend is dropped. A backend may read
    /// a block in place after the call that brought it; then [`running`](Self::running) says how many it still may. Before
    /// the first pass only. Whether it does.
    fn lend(&mut self, slots: &[u8], slot_bytes: usize, ffn: &FfnExtent) -> bool {
        let _ = (slots, slot_bytes, ffn);
        false
    }
    /// Of the blocks in lent slots that calls have brought, oldest first, how many at the end may still be read: they must
    /// stay as they are.
    fn running(&self) -> usize {
        0
    }
    /// Waits until none is.
    fn wait_blocks(&mut self) {}
    /// Starts a pass. Panics if the pass does not fit what the backend was made for.
    fn begin(&mut self, pass: Pass<'_>);
    /// Sets the residual of token `index` of the pass to `row` (one row of the embedding table).
    fn embed(&mut self, index: u32, row: MatrixRows<'_>);
    /// h = RMSNorm(x) with the layer's attention gain.
    fn attn_input(&mut self, layer: LayerId);
    /// Computes rows of q, k, v from h, or of o from the attention's result (added to the residual).
    /// One call has either q, k, v parts or o parts; those of one matrix ascend.
    fn project(&mut self, layer: LayerId, parts: &[ProjectionPart<'_>]);
    /// Rotates q and k, appends k and v to the cache, attends.
    fn attend(&mut self, layer: LayerId);
    /// h = RMSNorm(x) with the layer's FFN gain; the FFN's sum starts at zero.
    fn mlp_input(&mut self, layer: LayerId);
    /// Adds the neurons' contributions: SiLU(gate . h) * (up . h) * down, Eq. 1.
    fn mlp(&mut self, layer: LayerId, blocks: &NeuronBlocks<'_>);
    /// Decode: the same for neurons in several places, in any order; all of one number format.
    ///
    /// Unless the backend was asked not to care (it says so itself), the sum depends on the order of the neurons over all
    /// calls since `mlp_input`, not on how they are split into calls and parts. Ascending it is `mlp`'s.
    fn mlp_blocks(&mut self, layer: LayerId, blocks: &[NeuronBlocks<'_>]);
    /// Decode, between `mlp_input` and `mlp_output`: the residual with what the FFN has summed so far, stand-ins
    /// included; hidden. Eq. 2's x~ after the stages that have run; after the last one, `mlp_output`'s result.
    fn feature(&self, out: &mut [f32]);
    /// Decode: what each of the neurons would add, |SiLU(gate . h) * (up . h)| * ||down||, without adding it.
    fn importance(&mut self, layer: LayerId, blocks: &NeuronBlocks<'_>, out: &mut [f32]);
    /// Decode: estimates every neuron's activation a~ = SiLU(g~ . h) * (u~ . h), and the error of going on with it:
    ///
    /// `score = sqrt((a~ * down_error)^2 + (SiLU'(g~ . h) * (u~ . h) * gate_error)^2 + (SiLU(g~ . h) * up_error)^2)`
    fn estimate(&mut self, layer: LayerId, base: &BaseNeurons<'_>, tables: &BaseTables<'_>);
    /// What the last `estimate` expects, one number a neuron.
    fn scores(&self) -> &[f32];
    /// Decode, after `estimate` with the same arguments: adds `(offset + slope * a~) * d~` for every neuron that is
    /// not [chosen](crate::is_chosen), and the constant. Adds nothing at all where every neuron is chosen: the FFN is
    /// exact then. Without down columns the constant is all that is added. At most once a layer; the sum is separate
    /// from the exact neurons', and the same whether it comes before or after them.
    fn stand_in(
        &mut self,
        layer: LayerId,
        base: &BaseNeurons<'_>,
        tables: &BaseTables<'_>,
        chosen: &[u64],
    );
    /// x += the FFN's sum, Eq. 2 after the last stage.
    fn mlp_output(&mut self, layer: LayerId);
    /// h = RMSNorm(x) with the final gain, for the tokens that the pass's outputs ask for.
    fn head_input(&mut self);
    /// Computes rows of the head: logits, or their share of the log-likelihoods. Parts ascend and cover all rows.
    fn head(&mut self, rows: &MatrixRows<'_>);
    /// The last token's logits; vocab_size. After a pass with [`Outputs::LastLogits`].
    fn logits(&self) -> &[f32];
    /// One negative log-likelihood (nats) a target. After a pass with [`Outputs::Score`].
    fn nll(&self) -> &[f32];
}
