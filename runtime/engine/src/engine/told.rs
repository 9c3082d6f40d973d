//! What an engine tells: counters, recordings, what layers took; and what it measures of the machine.

use super::{DENSE_WALK, Engine};
use crate::error::EngineError;
use crate::flow::Disk;
use crate::recording::{Recorder, Recording};
use crate::sparse::Visit;
use crate::stats::{LayerStats, Stats};
use crate::timeline::Timeline;
use ls_bundle::ids::LayerId;
use ls_cache::Counts;
use ls_control::profile::Visit as VisitRecord;
use std::time::{Duration, Instant};

impl Engine {
    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Bytes read from the bundle so far.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.stream.store().counters().bytes
    }

    /// What happened to the requests for single blocks, all layers together; None if decode is dense.
    #[must_use]
    pub fn cache_counts(&self) -> Option<Counts> {
        let (_, ffn) = self.sparse.as_ref()?;
        let mut counts = Counts::default();
        for layer in 0..self.map.layers.len() {
            counts += ffn.cache().counts(LayerId(layer as u16));
        }
        Some(counts)
    }

    /// What happened in each layer, and to its requests for blocks; nothing if decode is dense.
    pub fn layer_stats(&self) -> impl Iterator<Item = (LayerStats, Counts)> {
        self.sparse.iter().flat_map(|(_, ffn)| {
            let counts = |layer: usize| ffn.cache().counts(LayerId(layer as u16));
            ffn.layers().iter().enumerate().map(move |(layer, stats)| (*stats, counts(layer)))
        })
    }

    /// Tokens for which blocks were read ahead, and all that were decoded sparsely.
    #[must_use]
    pub fn prefetched_tokens(&self) -> (u64, u64) {
        self.sparse.as_ref().map_or((0, 0), |(_, ffn)| ffn.prefetched_tokens())
    }

    /// Whether the backend reads blocks in their slots, instead of copying them; never if decode is dense.
    #[must_use]
    pub fn reads_slots_in_place(&self) -> bool {
        self.sparse.as_ref().is_some_and(|(_, ffn)| ffn.is_lent())
    }

    /// C^G of each layer: bytes of FFN weights that a token computes; none if decode is dense.
    pub fn work_bytes(&self) -> impl Iterator<Item = u64> {
        self.sparse.iter().flat_map(|(_, ffn)| ffn.work_bytes())
    }

    /// Keeps what `count` layers take of tokens to come. Allocates.
    ///
    /// # Panics
    /// If decode is dense.
    pub fn keep_visits(&mut self, count: usize) {
        let (_, ffn) = self.sparse.as_mut().expect("sparse decode");
        ffn.keep_visits(count);
    }

    /// What was kept, in turn. The last one does not know R_{n+1} before the next layer was asked.
    ///
    /// # Panics
    /// If decode is dense.
    pub fn visits(&mut self) -> &mut Vec<VisitRecord> {
        let (_, ffn) = self.sparse.as_mut().expect("sparse decode");
        ffn.visits()
    }

    /// Records what each token that is decoded from now on wants, until `recording` is full. Allocates.
    ///
    /// # Panics
    /// If decode is not dense.
    pub fn record(&mut self, recording: Recording) {
        assert!(self.sparse.is_none(), "the truth is a dense engine's");
        self.recorder = Some(Recorder::new(&self.map, recording));
    }

    /// What was recorded.
    pub fn take_recording(&mut self) -> Option<Recording> {
        self.recorder.take().map(Recorder::finish)
    }

    /// Keeps a timeline of all that comes, and returns the one that was kept so far.
    pub fn trace(&mut self, timeline: Timeline) -> Timeline {
        std::mem::replace(&mut self.timeline, timeline)
    }

    /// Streams one pass without computing, and returns the time it took: the least that any pass can take here.
    pub fn read_pass(&mut self) -> Result<Duration, EngineError> {
        self.read_pieces().map_err(|error| self.checker.naming(error))
    }

    fn read_pieces(&mut self) -> Result<Duration, EngineError> {
        let started = Instant::now();
        self.stream.switch(DENSE_WALK);
        self.stream.expect_passes(1);
        let mut ignored = Stats::default();
        for piece in 0..self.program.pieces.len() as u32 {
            self.stream.pump()?;
            self.stream.wait(piece, &mut ignored)?;
            self.stream.release(piece);
        }
        Ok(started.elapsed())
    }

    /// Bytes a second at which `threads` threads read what is resident; None if nothing is.
    #[must_use]
    pub fn memory_bandwidth(&self, threads: usize, budget_ms: u64) -> Option<f64> {
        let parts: Vec<&[u8]> =
            self.resident.iter().flatten().map(|r| &r.bytes()[..r.len as usize]).collect();
        (!parts.is_empty()).then(|| ls_io::memory::read_bandwidth(&parts, threads, budget_ms))
    }

    /// Computes with up to `most` blocks of a layer that are in memory, in so many segments, as if the token before had
    /// wanted them: how many there were, and the time of it. What it computes is thrown away.
    ///
    /// # Panics
    /// If decode is dense, or no token was decoded yet.
    pub fn time_blocks(
        &mut self,
        layer: LayerId,
        most: usize,
        segments: usize,
    ) -> (usize, Duration) {
        let Engine { sparse, backend, stream, checker, stats, timeline, controller, .. } = self;
        let (_, ffn) = sparse.as_mut().expect("sparse decode");
        let controller = controller.as_deref().expect("nothing is being decoded");
        let (backend, disk) = (backend.as_mut(), Disk { stream, checker, stats, timeline });
        ffn.time_blocks(&mut Visit { layer, controller, backend, disk }, most, segments)
    }
}
