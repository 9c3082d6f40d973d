//! Faults of the disk while a text is generated, and damage of the file before: the right tokens or an error that names
//! the block, never other tokens.

#[expect(dead_code, reason = "this test computes with a real backend")]
mod sample;

use ls_bundle::Bundle;
use ls_bundle::ids::ByteCount;
use ls_bundle::model::ModelConfig;
use ls_cpu::{CpuBackend, CpuOptions, Kernels, KvDType};
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest};
use ls_engine::system::{Columns, System};
use ls_engine::{
    Engine, EngineError, EngineErrorKind, EngineOptions, SparseOptions, Verify, sparse,
};
use ls_io::{Alignment, Event, Faults, SimOptions, SimStore};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use sample::{config, write_based_bundle};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const SYSTEMS: [System; 4] =
    [System::Dense, System::DejaVuPlus, System::LeanStream, System::LeanStreamBase];
const PROMPT: [u32; 5] = [3, 59, 20, 3, 17];
const TOKENS: u64 = 4;

struct Sample {
    folder: tempfile::TempDir,
    bundle: Arc<Bundle>,
    bytes: Arc<Vec<u8>>,
}

impl Sample {
    fn new(tied: bool) -> Sample {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sample.lsb");
        let model = ModelConfig {
            vocab_size: 60,
            hidden: 64,
            ffn_hidden: 90,
            layers: 2,
            heads: 2,
            kv_heads: 1,
            ..config(tied)
        };
        let bundle = Arc::new(write_based_bundle(&path, model, 2));
        let bytes = Arc::new(std::fs::read(&path).unwrap());
        Sample { folder, bundle, bytes }
    }
}

/// A run: everything that decides what is read when.
#[derive(Clone, Copy, Debug)]
struct Case {
    system: System,
    verify: Verify,
    weight_cache: f64,
    read_cost_bytes: u64,
    seed: u64,
}

/// Tokens, each the likeliest, of a prompt in two passes; and the bits of all logits.
fn generate(
    bundle: &Arc<Bundle>,
    bytes: &Arc<Vec<u8>>,
    case: &Case,
    events: &[(u64, Event)],
) -> Result<Vec<u32>, EngineError> {
    let columns = Columns::of(case.system, 0.4).map(Columns::canonical);
    let sparse = columns.map(|columns| SparseOptions { columns, recording: None });
    let needs = sparse.as_ref().map(|s| sparse::needs(bundle, &s.columns, None)).transpose()?;
    let alignment = Alignment { offset: 512, memory: 512 };
    let request = PlanRequest {
        budget: Budget::WeightCache(case.weight_cache),
        fixed: ByteCount::ZERO,
        context: Some(16),
        prompt_tokens: 3,
        alignment,
        request_bytes: 6000,
        depth: 3,
        sparse: needs,
        read_cost_bytes: case.read_cost_bytes,
    };
    let none = |_, _| BackendBytes::default();
    let plan = MemoryPlan::fit(&request, bundle.model(), bundle.weights(), &none)?;
    let cpu = CpuOptions {
        context: 16,
        pass_tokens: plan.pass_tokens,
        scored_tokens: 0,
        threads: 1,
        kv_cache: KvDType::F16,
        kernels: Kernels::detect(),
    };
    let backend = CpuBackend::new(bundle.model(), bundle.vectors().clone(), &cpu).unwrap();
    let faults = Faults { events: events.to_vec(), ..Faults::default() };
    let disk = SimOptions {
        seed: case.seed,
        alignment,
        latency_us: 1..900,
        faults,
        ..SimOptions::default()
    };
    let store = Box::new(SimStore::new(Arc::clone(bytes), disk));
    let options = EngineOptions { verify: case.verify, sparse };
    let mut engine = Engine::open(bundle, &plan, options, store, Box::new(backend), &mut |_| {})?;
    let likeliest = |logits: &[f32]| {
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        best.map_or(0, |(token, _)| token as u32)
    };
    let mut said: Vec<u32> = Vec::new();
    let mut token = likeliest(engine.prefill(&PROMPT, TOKENS)?);
    for left in (0..TOKENS).rev() {
        let logits = engine.decode(token, left)?;
        said.push(token);
        token = likeliest(logits);
        said.extend(logits.iter().map(|x| x.to_bits()));
    }
    Ok(said)
}

/// The case and the faults that a seed stands for.
fn schedule(seed: u64, bytes: u64) -> (Case, Vec<(u64, Event)>) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut case = Case {
        system: SYSTEMS[random.random_range(0..SYSTEMS.len())],
        verify: Verify::First,
        weight_cache: random.random_range(0.0..0.9),
        read_cost_bytes: [0, 2000, 8000][random.random_range(0..3)],
        seed,
    };
    let mut events = BTreeMap::new();
    for _ in 0..random.random_range(1..6) {
        // Most requests are made early, and loading is a part of it.
        let most = [8, 60, 400][random.random_range(0..3)];
        let at = random.random_range(0..most);
        let bit = random.random_range(0..8 * bytes);
        let event = match random.random_range(0..9) {
            0 => Event::Errno(libc::EIO),
            1 => Event::Errno(libc::EINTR),
            2 => Event::Errno(libc::EINVAL),
            3 => Event::Errno(libc::ENOSPC),
            4 | 5 => Event::Short,
            6 => Event::Flip(bit),
            7 => Event::FlipOnDisk(bit),
            _ if random.random() => Event::Replace,
            _ => Event::Truncate(bit / 8),
        };
        // What changes after it was checked is only found by checking it always.
        if matches!(event, Event::Flip(_) | Event::FlipOnDisk(_) | Event::Replace) && at > 0 {
            case.verify = Verify::Always;
        }
        events.insert(at, event);
        if event == Event::Errno(libc::EIO) && random.random() {
            // A disk that does not recover.
            events.insert(at + 1, event);
        }
    }
    if matches!(events.get(&0), Some(Event::Flip(_))) {
        case.verify = Verify::Always;
    }
    (case, events.into_iter().collect())
}

/// What is wrong with a run under these faults; whether it ended in an error otherwise.
fn judge(
    sample: &Sample,
    case: &Case,
    events: &[(u64, Event)],
    wanted: &[u32],
) -> Result<bool, String> {
    let error = match generate(&sample.bundle, &sample.bytes, case, events) {
        Ok(said) if said == wanted => return Ok(false),
        Ok(_) => return Err("other tokens".to_owned()),
        Err(error) => error,
    };
    let text = error.to_string();
    let names_a_block = sample.bundle.blocks().any(|block| text.contains(&block.name.to_string()));
    if !matches!(error.kind(), EngineErrorKind::Io | EngineErrorKind::Corrupt) || !names_a_block {
        return Err(format!("an error that does not name a block: {text}"));
    }
    Ok(true)
}

/// Runs schedules; whatever fails is made smaller by leaving faults out, one by one.
fn run_schedules(seeds: std::ops::Range<u64>) {
    let samples = [Sample::new(true), Sample::new(false)];
    let mut known = BTreeMap::new();
    let (mut passed, mut failed) = (0, 0);
    for seed in seeds {
        let tied = seed as usize % 2;
        let sample = &samples[tied];
        let (case, mut events) = schedule(seed, sample.bytes.len() as u64);
        let wanted = known.entry((tied, case.system as usize)).or_insert_with(|| {
            let quiet = Case { weight_cache: 1.0, read_cost_bytes: 0, ..case };
            generate(&sample.bundle, &sample.bytes, &quiet, &[]).unwrap()
        });
        match judge(sample, &case, &events, wanted) {
            Ok(false) => passed += 1,
            Ok(true) => failed += 1,
            Err(mut problem) => {
                let mut at = 0;
                while at < events.len() {
                    let mut fewer = events.clone();
                    fewer.remove(at);
                    match judge(sample, &case, &fewer, wanted) {
                        Err(same) => (events, problem) = (fewer, same),
                        Ok(_) => at += 1,
                    }
                }
                panic!("seed {seed}: {problem}\n{case:?}\n{events:?}");
            }
        }
    }
    eprintln!("{passed} gave the right tokens, {failed} an error that names a block");
    assert!(passed > 0 && failed > 0, "{passed} passed, {failed} failed: both must be seen");
}

#[test]
fn a_thousand_schedules_of_faults_give_the_right_tokens_or_an_error_that_names_a_block() {
    run_schedules(0..1000);
}

/// Without one more reading, none of these would pass.
#[test]
fn one_flip_on_the_way_costs_one_more_read() {
    for tied in [true, false] {
        let sample = Sample::new(tied);
        for system in SYSTEMS {
            let case = Case {
                system,
                verify: Verify::Always,
                weight_cache: 0.3,
                read_cost_bytes: 2000,
                seed: 1,
            };
            let wanted = generate(&sample.bundle, &sample.bytes, &case, &[]).unwrap();
            for at in (0..200).step_by(3) {
                let found =
                    generate(&sample.bundle, &sample.bytes, &case, &[(at, Event::Flip(at * 997))]);
                let found =
                    found.unwrap_or_else(|error| panic!("{system:?}, request {at}: {error}"));
                assert!(found == wanted, "{system:?}, request {at}");
            }
        }
    }
}

/// Flips single bits of a bundle with all there is, evenly over its sections, the header, the table and the zeros
/// between. Opening and verifying finds each; a run that does not verify first ends in an error or in the same tokens.
fn flip_bits(count: u64) {
    let sample = Sample::new(false);
    let path = sample.folder.path().join("sample.lsb");
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let mut bytes = Vec::clone(&sample.bytes);
    let sections: Vec<_> =
        sample.bundle.sections().iter().map(|s| s.extent.offset..s.extent.end()).collect();
    let mut areas = vec![0..64, 64..64 + 32 * sections.len() as u64];
    areas.extend(
        sections.windows(2).map(|pair| pair[0].end..pair[1].start).filter(|gap| !gap.is_empty()),
    );
    areas.extend(sections);
    let case = |number: u64| Case {
        system: SYSTEMS[number as usize % SYSTEMS.len()],
        verify: Verify::First,
        weight_cache: 0.3,
        read_cost_bytes: 0,
        seed: 0,
    };
    let wanted: Vec<_> =
        (0..4).map(|n| generate(&sample.bundle, &sample.bytes, &case(n), &[]).unwrap()).collect();
    let mut random = Xoshiro256PlusPlus::seed_from_u64(7);
    let (mut refused, mut stopped, mut same) = (0, 0, 0);
    for number in 0..count {
        let area = &areas[number as usize % areas.len()];
        let at = random.random_range(area.clone());
        let bit = 1 << random.random_range(0..8);
        bytes[at as usize] ^= bit;
        file.write_all_at(&bytes[at as usize..=at as usize], at).unwrap();
        match Bundle::open(&path) {
            Err(_) => refused += 1,
            Ok(bundle) => {
                bundle.verify(&mut |_, _| ()).expect_err(&format!("bit {bit:#x} of byte {at}"));
                match generate(&Arc::new(bundle), &Arc::new(bytes.clone()), &case(number), &[]) {
                    Err(error) => {
                        assert_eq!(error.kind(), EngineErrorKind::Corrupt, "byte {at}: {error}");
                        stopped += 1;
                    }
                    Ok(said) => {
                        assert!(said == wanted[number as usize % 4], "byte {at} changes tokens");
                        same += 1;
                    }
                }
            }
        }
        bytes[at as usize] ^= bit;
        file.write_all_at(&bytes[at as usize..=at as usize], at).unwrap();
    }
    eprintln!(
        "{count} flips found: {refused} when opened, {stopped} when run, {same} not needed by the run"
    );
    assert!(
        refused > 0 && stopped > 0 && same > 0,
        "{refused}, {stopped}, {same}: all must be seen"
    );
}

#[test]
fn ten_thousand_flipped_bits_are_found_and_change_no_token() {
    flip_bits(10_000);
}
