//! The same weights reach the backend in the same order, whatever is resident and however reads come back.

mod counting;
#[expect(dead_code, reason = "no base is needed here")]
mod sample;

use counting::allocations;
use ls_bundle::Bundle;
use ls_bundle::ids::ByteCount;
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest};
use ls_engine::{Engine, EngineErrorKind, Verify};
use ls_io::{BlockStore, Faults, SimOptions, SimStore};
use sample::{HashBackend, config, write_bundle};
use std::sync::Arc;

struct Sample {
    verify: Verify,
    _folder: tempfile::TempDir,
    bundle: Arc<Bundle>,
    bytes: Arc<Vec<u8>>,
}

fn sample(tied: bool) -> Sample {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sample.lsb");
    let bundle = Arc::new(write_bundle(&path, config(tied), 2));
    let bytes = Arc::new(std::fs::read(&path).unwrap());
    Sample { verify: Verify::First, _folder: folder, bundle, bytes }
}

impl Sample {
    fn plan(&self, share: f64, pass_tokens: u32) -> MemoryPlan {
        let request = PlanRequest {
            budget: Budget::WeightCache(share),
            fixed: ByteCount::ZERO,
            context: Some(128),
            prompt_tokens: pass_tokens,
            alignment: SimOptions::default().alignment,
            request_bytes: 40_000,
            depth: 3,
            sparse: None,
            read_cost_bytes: 0,
        };
        let bytes = |_, _| BackendBytes::default();
        MemoryPlan::fit(&request, self.bundle.model(), self.bundle.weights(), &bytes).unwrap()
    }

    fn engine(
        &self,
        plan: &MemoryPlan,
        options: SimOptions,
    ) -> Result<Engine, ls_engine::EngineError> {
        let store: Box<dyn BlockStore> = Box::new(SimStore::new(self.bytes.clone(), options));
        let backend = Box::new(HashBackend::new());
        Engine::open(&self.bundle, plan, self.verify.into(), store, backend, &mut |_| {})
    }

    /// A prompt of two passes and four tokens: everything that the backend said.
    fn run(
        &self,
        share: f64,
        options: SimOptions,
    ) -> Result<Vec<Vec<f32>>, ls_engine::EngineError> {
        let mut engine = self.engine(&self.plan(share, 9), options)?;
        let mut said = vec![engine.prefill(&[1, 499, 3, 3, 77, 250, 0, 8, 9, 10, 11], 4)?.to_vec()];
        for token in [5, 498, 5, 123] {
            said.push(engine.decode(token, 0)?.to_vec());
        }
        Ok(said)
    }
}

fn seeded(seed: u64) -> SimOptions {
    SimOptions { seed, latency_us: 1..2000, ..SimOptions::default() }
}

#[test]
fn every_budget_gives_the_same_walk() {
    for tied in [true, false] {
        let sample = sample(tied);
        let resident = sample.run(1.0, seeded(0)).unwrap();
        assert_ne!(resident[1], resident[2], "the hash tells tokens apart");
        for seed in 0..40 {
            let share = seed as f64 / 40.0;
            assert_eq!(
                sample.run(share, seeded(seed)).unwrap(),
                resident,
                "share {share}, seed {seed}"
            );
        }
    }
}

#[test]
fn a_fault_gives_a_retry_or_an_error_never_other_weights() {
    let sample = sample(true);
    let resident = sample.run(1.0, seeded(0)).unwrap();
    let (mut passed, mut failed) = (0, 0);
    for seed in 0..200 {
        let faults = Faults { eio_per_mille: 60, short_per_mille: 100, ..Faults::default() };
        match sample.run(0.3, SimOptions { faults, ..seeded(seed) }) {
            Ok(said) => {
                assert_eq!(said, resident, "seed {seed}");
                passed += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), EngineErrorKind::Io, "{error}");
                failed += 1;
            }
        }
    }
    assert!(passed > 0 && failed > 0, "{passed} passed, {failed} failed: both must be seen");
}

/// Every bit of every weight is covered: a byte that the disk always gives back wrong stops the run and is named,
/// wherever it is and whatever is resident.
#[test]
fn a_damaged_block_never_becomes_a_token() {
    for tied in [true, false] {
        let sample = sample(tied);
        let resident = sample.run(1.0, seeded(0)).unwrap();
        let blocks: Vec<_> = sample.bundle.blocks().collect();
        for (index, block) in blocks.iter().enumerate().step_by(7) {
            let at = block.extent.offset + index as u64 * 131 % block.extent.len;
            let faults = Faults { flipped_bytes: vec![at], ..Faults::default() };
            let share = index as f64 / blocks.len() as f64;
            match sample.run(share, SimOptions { faults, ..seeded(index as u64) }) {
                Err(error) => {
                    assert_eq!(error.kind(), EngineErrorKind::Corrupt, "{error}");
                    assert!(
                        error.to_string().contains(&block.name.to_string()),
                        "{error} names {}",
                        block.name
                    );
                }
                // Rows of an untied embedding that nobody asked for.
                Ok(said) => assert!(!tied && said == resident, "{} is damaged", block.name),
            }
        }
    }
}

#[test]
fn a_flip_on_the_way_is_found_when_every_read_is_checked() {
    let sample = Sample { verify: Verify::Always, ..sample(true) };
    let resident = sample.run(1.0, seeded(0)).unwrap();
    let mut found = 0;
    for seed in 0..60 {
        // What is flipped is read once more; with so many flips that one is often flipped too.
        let faults = Faults { flip_per_mille: 200, ..Faults::default() };
        match sample.run(0.2, SimOptions { faults, ..seeded(seed) }) {
            Ok(said) => assert_eq!(said, resident, "seed {seed}"),
            Err(error) => {
                assert_eq!(error.kind(), EngineErrorKind::Corrupt, "{error}");
                found += 1;
            }
        }
    }
    assert!(found > 5, "{found} flips found");
}

#[test]
fn a_truncated_file_is_an_error() {
    let sample = sample(true);
    let faults = Faults { truncated_to: Some(sample.bytes.len() as u64 / 2), ..Faults::default() };
    let error = sample.run(0.1, SimOptions { faults, ..seeded(1) }).unwrap_err();
    assert_eq!(error.kind(), EngineErrorKind::Io, "{error}");
}

#[test]
fn what_is_streamed_is_read_once_a_pass_and_what_is_resident_never_again() {
    let sample = sample(true);
    for share in [0.0, 0.4, 0.8, 1.0] {
        let plan = sample.plan(share, 64);
        let mut engine = sample.engine(&plan, seeded(3)).unwrap();
        let loaded = engine.bytes_read();
        let resident = plan.resident().0;
        assert!(
            loaded >= resident && loaded <= resident + 5 * 2 * 4096,
            "{loaded} loaded of {resident}"
        );
        engine.prefill(&[2; 40], 3).unwrap();
        for token in 0..3 {
            engine.decode(token, 2 - u64::from(token)).unwrap();
        }
        let pieces = engine.program().pieces.len() as u64;
        let streamed = engine.program().streamed_bytes();
        let passes = 4;
        // Reads are whole 4 KiB blocks; rows of the streamed part of the embedding come on top, 43 at most.
        let most = passes * (streamed + pieces * 2 * 4096) + 43 * 2 * 4096;
        let read = engine.bytes_read() - loaded;
        assert!(
            read >= passes * streamed && read <= most,
            "share {share}: {read} read, {streamed} a pass"
        );
        if share == 1.0 {
            assert_eq!(read, 0);
        }
    }
}

#[test]
fn decoding_does_not_allocate() {
    let sample = sample(true);
    for share in [0.0, 0.5, 1.0] {
        let mut engine = sample.engine(&sample.plan(share, 8), seeded(5)).unwrap();
        engine.prefill(&[1, 2, 3], 40).unwrap();
        engine.decode(4, 39).unwrap();
        let before = allocations();
        for token in 0..30 {
            engine.decode(token, 38 - u64::from(token)).unwrap();
        }
        let allocated = allocations() - before;
        assert_eq!(allocated, 0, "share {share}: allocations in 30 tokens");
    }
}

#[test]
fn the_context_is_a_limit_and_rewinding_frees_it() {
    let sample = sample(true);
    let mut engine = sample.engine(&sample.plan(1.0, 128), seeded(0)).unwrap();
    let error = engine.prefill(&[1; 129], 0).unwrap_err();
    assert_eq!(error.kind(), EngineErrorKind::Request);
    engine.prefill(&[1; 128], 0).unwrap();
    assert_eq!(engine.decode(1, 0).unwrap_err().kind(), EngineErrorKind::Request);
    engine.rewind(100);
    engine.decode(1, 0).unwrap();
    assert_eq!(engine.position(), 101);
    assert_eq!(engine.prefill(&[], 0).unwrap_err().kind(), EngineErrorKind::Request);
}
