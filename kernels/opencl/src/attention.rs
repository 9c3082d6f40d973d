//! Attention: which kernel runs on how many work-groups.

use crate::backend::OpenClBackend;
use crate::buffers::KEY_CHUNK;
use crate::device::Arg;
use ls_bundle::ids::LayerId;
use ls_compute::{KvDType, Shape};

/// Keys of a step; `KEYS` of `cl/attention.cl`.
const KEYS: usize = 32;

/// `Cache` of `cl/attention.cl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct CacheArgs {
    kv_heads: u32,
    context: u32,
    row_bytes: u32,
    quantised: u32,
}

/// Local memory of a work-group, bytes.
pub(crate) fn local_bytes(shape: &Shape) -> usize {
    let (group, wide) = (shape.group(), shape.head_dim + 1);
    4 * ((2 * group + KEYS) * wide + group * (KEYS + 3))
}

impl OpenClBackend {
    fn cache(&self) -> CacheArgs {
        let dtype = self.options.kv_cache;
        CacheArgs {
            kv_heads: self.shape.kv_heads as u32,
            context: self.options.context,
            row_bytes: dtype.dtype().row_bytes(self.shape.head_dim as u32) as u32,
            quantised: u32::from(dtype == KvDType::Q8_0),
        }
    }

    /// Biases, head norms and rotation of q and k; k and v go to the cache. q is also divided by sqrt(head_dim).
    pub(crate) fn rotate_and_append(&mut self, layer: LayerId) {
        let (b, places) = (&self.buffers, self.vectors.layers[layer.index()].attention);
        let (shape, cache) = (&self.shape, self.cache());
        let args = [
            Arg::Memory(&b.q),
            Arg::Memory(&b.k),
            Arg::Memory(&b.v),
            Arg::Memory(&self.vectors.memory),
            Arg::Bytes(bytemuck::bytes_of(&places)),
            Arg::F32(self.norm_epsilon),
            Arg::Memory(&b.turns),
            Arg::U32(shape.heads as u32),
            Arg::U32(shape.head_dim as u32),
            Arg::Memory(&b.cache),
            Arg::Bytes(bytemuck::bytes_of(&cache)),
            Arg::U32(layer.index() as u32),
            Arg::U32(self.pass.first_position),
            Arg::Local(4 * shape.head_dim),
        ];
        let groups = [shape.heads + 2 * shape.kv_heads, self.pass.tokens as usize, 1];
        // SAFETY: q, k and v have a row a token, the cache one for each position up to the context.
        unsafe { self.launch(&self.kernels.rotate, groups, &args) };
    }

    /// Attention of all tokens of the pass; results replace the queries. One token's positions are cut into chunks.
    pub(crate) fn attend_all(&mut self, layer: LayerId) {
        let (b, shape, cache) = (&self.buffers, &self.shape, self.cache());
        let (first, chunk) = (self.pass.first_position, KEY_CHUNK as u32);
        let window = u32::try_from(shape.window).unwrap_or(u32::MAX);
        let chunks = if self.pass.decode {
            let first_seen = (first + 1).saturating_sub(window);
            first / chunk - first_seen / chunk + 1
        } else {
            1
        };
        let args = [
            Arg::Memory(&b.q),
            Arg::Memory(&b.partials),
            Arg::U32(shape.heads as u32),
            Arg::U32(shape.head_dim as u32),
            Arg::Memory(&b.cache),
            Arg::Bytes(bytemuck::bytes_of(&cache)),
            Arg::U32(layer.index() as u32),
            Arg::U32(first),
            Arg::U32(window),
            Arg::Local(local_bytes(shape)),
        ];
        let groups = [self.pass.tokens as usize, shape.kv_heads, chunks as usize];
        // SAFETY: as above; partials have room for the chunks of a context.
        unsafe { self.launch(&self.kernels.attend, groups, &args) };
        if chunks > 1 {
            let args = [
                Arg::Memory(&b.q),
                Arg::Memory(&b.partials),
                Arg::U32(chunks),
                Arg::U32(shape.group() as u32),
                Arg::U32(shape.head_dim as u32),
            ];
            // SAFETY: as above.
            unsafe { self.launch(&self.kernels.merge, [shape.heads, 1, 1], &args) };
        }
    }
}
