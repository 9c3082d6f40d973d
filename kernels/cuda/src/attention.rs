//! Attention: which kernel runs on how many thread blocks.

use crate::backend::CudaBackend;
use crate::buffers::KEY_CHUNK;
use crate::device::{Grid, args};
use ls_bundle::ids::LayerId;
use ls_compute::{KvDType, Shape};

/// Keys of a step; `KEYS` of `cu/attention.cu`.
const KEYS: usize = 32;

/// `Cache` of `cu/attention.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct CacheArgs {
    data: u64,
    kv_heads: u32,
    context: u32,
    row_bytes: u32,
    quantised: u32,
}

/// Shared memory of a thread block, bytes.
pub(crate) fn shared_bytes(shape: &Shape) -> u32 {
    let (group, wide) = (shape.group(), shape.head_dim + 1);
    (4 * ((2 * group + KEYS) * wide + group * (KEYS + 2))) as u32
}

impl CudaBackend {
    fn cache(&self) -> CacheArgs {
        let dtype = self.options.kv_cache;
        CacheArgs {
            data: self.buffers.cache.address(),
            kv_heads: self.shape.kv_heads as u32,
            context: self.options.context,
            row_bytes: dtype.dtype().row_bytes(self.shape.head_dim as u32) as u32,
            quantised: u32::from(dtype == KvDType::Q8_0),
        }
    }

    /// Biases, head norms and rotation of q and k; k and v go to the cache. q is also divided by sqrt(head_dim).
    pub(crate) fn rotate_and_append(&mut self, layer: LayerId) {
        let (b, v) = (&self.buffers, self.vectors.layers[layer.index()]);
        let (heads, head_dim) = (self.shape.heads as u32, self.shape.head_dim as u32);
        let (index, first) = (layer.index() as u32, self.pass.first_position);
        let grid = Grid::new(self.pass.tokens, 256);
        // SAFETY: q, k and v have a row a token, the cache one for each position up to the context.
        unsafe {
            self.launch(
                self.functions.rotate,
                grid,
                args!(
                    b.q.address(),
                    b.k.address(),
                    b.v.address(),
                    v.q_bias,
                    v.k_bias,
                    v.v_bias,
                    v.q_norm,
                    v.k_norm,
                    self.norm_epsilon,
                    b.turns.address(),
                    heads,
                    head_dim,
                    self.cache(),
                    index,
                    first,
                ),
            );
        }
    }

    /// Attention of all tokens of the pass; results replace the queries. One token's positions are cut into chunks.
    pub(crate) fn attend_all(&mut self, layer: LayerId) {
        let (heads, head_dim) = (self.shape.heads as u32, self.shape.head_dim as u32);
        let first = self.pass.first_position;
        let window = u32::try_from(self.shape.window).unwrap_or(u32::MAX);
        let chunks = if self.pass.decode {
            let first_seen = (first + 1).saturating_sub(window);
            first / KEY_CHUNK as u32 - first_seen / KEY_CHUNK as u32 + 1
        } else {
            1
        };
        let (q, partials) = (self.buffers.q.address(), self.buffers.partials.address());
        let grid = Grid {
            blocks: [self.pass.tokens, self.shape.kv_heads as u32, chunks],
            shared_bytes: shared_bytes(&self.shape),
            ..Grid::new(1, 128)
        };
        let index = layer.index() as u32;
        let group = self.shape.group() as u32;
        // SAFETY: as above; partials have room for the chunks of a context.
        unsafe {
            let (attend, cache) = (self.functions.attend, self.cache());
            let args = args!(q, partials, heads, head_dim, cache, index, first, window);
            self.launch(attend, grid, args);
            if chunks > 1 {
                let grid = Grid::new(heads, 128);
                let args = args!(q, partials, chunks, group, head_dim);
                self.launch(self.functions.merge, grid, args);
            }
        }
    }
}
