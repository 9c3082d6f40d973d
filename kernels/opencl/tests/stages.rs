//! The FFN in stages on the first OpenCL device, by flags where it can and by events.

use half::f16;
use ls_bundle::model::DType;
use ls_compute::conformance::Rng;
use ls_opencl::{Block, Coordination, Device, MlpShape, Sharing, StagedMlp, StagedOptions, Wanted};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

const HIDDEN: usize = 320;
const BLOCKS: u32 = 200;
/// |a - b|^2 / |b|^2 of f32 sums in any order.
const ERROR_MAX: f64 = 1e-10;
/// Runs of each number of work-groups.
const RUNS: usize = 50;

/// One device for all tests, one test at a time: a kernel that waits needs all compute units.
fn device() -> MutexGuard<'static, Device> {
    static DEVICE: LazyLock<Mutex<Device>> = LazyLock::new(|| {
        let device = Device::open(Wanted::Any);
        Mutex::new(device.unwrap_or_else(|error| panic!("tools/setup.sh helps: {error}")))
    });
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The ways that the device has.
fn ways(device: &Device) -> &'static [Coordination] {
    match device.info().sharing {
        Sharing::Atomics => &[Coordination::Flags, Coordination::Events],
        _ => &[Coordination::Events],
    }
}

/// A layer on the device, and its neurons as numbers.
struct Layer {
    mlp: StagedMlp,
    input: Vec<f32>,
    weights: Vec<f32>,
}

fn layer(device: &Device, change: impl FnOnce(&mut StagedOptions)) -> Layer {
    let mut rng = Rng(5);
    let halves: Vec<f16> =
        (0..BLOCKS as usize * 2 * 3 * HIDDEN).map(|_| f16::from_f32(0.15 * rng.unit())).collect();
    let block_bytes = 2 * 3 * 2 * HIDDEN;
    let shape = MlpShape {
        dtype: DType::F16,
        hidden: HIDDEN as u32,
        block_neurons: 2,
        block_stride: block_bytes as u32 + 64,
    };
    // Time in which other processes have the processor counts as waiting.
    let mut options = StagedOptions { patience_ms: 20_000, ..StagedOptions::new(device, BLOCKS) };
    change(&mut options);
    let mut mlp = StagedMlp::new(device, shape, options).unwrap();
    let input: Vec<f32> = (0..HIDDEN).map(|_| rng.unit()).collect();
    mlp.set_input(&input).unwrap();
    for (index, halves) in (0..).zip(halves.chunks_exact(6 * HIDDEN)) {
        let bytes: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
        mlp.write_block(index, &bytes).unwrap();
    }
    Layer { mlp, input, weights: halves.iter().map(|half| half.to_f32()).collect() }
}

impl Layer {
    fn sum(&self, blocks: &[Block]) -> Vec<f64> {
        let mut sum = vec![0f64; HIDDEN];
        for block in blocks {
            let all = &self.weights[block.index as usize * 6 * HIDDEN..][..6 * HIDDEN];
            for neuron in all.chunks_exact(3 * HIDDEN).take(block.neurons as usize) {
                let dot = |row: &[f32]| -> f64 {
                    row.iter().zip(&self.input).map(|(&w, &h)| f64::from(w) * f64::from(h)).sum()
                };
                let (gate, up) = (dot(&neuron[..HIDDEN]), dot(&neuron[HIDDEN..2 * HIDDEN]));
                let activation = gate / (1.0 + (-gate).exp()) * up;
                let down = &neuron[2 * HIDDEN..];
                sum.iter_mut().zip(down).for_each(|(s, &d)| *s += activation * f64::from(d));
            }
        }
        sum
    }

    fn assert_is(&self, got: &[f32], blocks: &[Block], what: &str) {
        let want = self.sum(blocks);
        let difference: f64 = got.iter().zip(&want).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
        let error = difference / want.iter().map(|b| b * b).sum::<f64>();
        assert!(error <= ERROR_MAX, "{what}: error {error:e}");
    }
}

/// Blocks of five stages: one of them empty, some blocks not full.
fn stages() -> [Vec<Block>; 5] {
    let block = |index: u32| Block { index, neurons: 2 - u32::from(index.is_multiple_of(7)) };
    [
        (0..60).map(block).collect(),
        (60..61).map(block).collect(),
        Vec::new(),
        (100..190).rev().map(block).collect(),
        (61..90).map(block).collect(),
    ]
}

/// Runs all stages one after another; the sum behind each.
fn run(layer: &mut Layer, what: &str) -> Vec<f32> {
    let before = layer.mlp.done();
    layer.mlp.launch(stages().len() as u32).unwrap();
    let (mut so_far, mut all) = (Vec::new(), Vec::new());
    let mut out = vec![f32::NAN; HIDDEN];
    for (stage, blocks) in (before..).zip(stages()) {
        layer.mlp.post(&blocks).unwrap();
        so_far.extend(blocks);
        layer.mlp.wait_done(stage + 1).unwrap();
        layer.mlp.partial(stage, &mut out);
        layer.assert_is(&out, &so_far, &format!("{what}, stage {stage}"));
        all.extend_from_slice(&out);
    }
    layer.mlp.finish().unwrap();
    all
}

#[test]
fn one_to_all_work_groups_never_hang_and_give_the_same_bits() {
    let device = device();
    for &way in ways(&device) {
        for work_groups in 1..=device.info().compute_units {
            let mut layer = layer(&device, |options| {
                (options.coordination, options.work_groups) = (Some(way), work_groups);
            });
            assert_eq!(layer.mlp.coordination(), way);
            let what = format!("{way:?}, {work_groups} work-groups");
            let first = run(&mut layer, &what);
            for again in 1..RUNS {
                let what = format!("{what}, run {again}");
                assert_eq!(run(&mut layer, &what), first, "{what}");
            }
        }
    }
}

#[test]
fn stages_posted_ahead_and_launches_in_a_row() {
    let device = device();
    for &way in ways(&device) {
        let mut layer = layer(&device, |options| options.coordination = Some(way));
        let mut out = vec![f32::NAN; HIDDEN];
        // Often enough that the rings of stages and entries come round.
        let launches = 4 * 16384 / 180;
        for _ in 0..launches {
            layer.mlp.launch(5).unwrap();
            stages().iter().for_each(|blocks| layer.mlp.post(blocks).unwrap());
        }
        layer.mlp.finish().unwrap();
        let done = layer.mlp.done();
        assert_eq!(done, 5 * launches);
        layer.mlp.partial(done - 1, &mut out);
        layer.assert_is(&out, &stages().concat(), &format!("{way:?}"));
    }
}

/// By the host's patience, by the device's, and by the host's wish.
#[test]
fn a_stage_that_never_comes_is_given_up() {
    let device = device();
    if device.info().sharing != Sharing::Atomics {
        eprintln!("nothing waits on this device");
        return;
    }
    let endless = u32::MAX;
    for (patience_ms, most_spins) in [(50, endless), (20_000, 10_000)] {
        let mut layer = layer(&device, |options| {
            (options.patience_ms, options.most_spins) = (patience_ms, most_spins);
        });
        for _ in 0..3 {
            let before = layer.mlp.done();
            layer.mlp.launch(2).unwrap();
            layer.mlp.post(&stages()[0]).unwrap();
            let error = layer.mlp.wait_done(before + 2).unwrap_err();
            assert!(error.is_timeout(), "{error}");
            // A new launch finds everything as it was.
            layer.mlp.launch(1).unwrap();
            let posted = layer.mlp.post(&stages()[1]);
            // Whoever has so little patience may give up before the host has posted.
            if posted.and_then(|()| layer.mlp.finish()).is_ok() {
                let mut out = vec![f32::NAN; HIDDEN];
                layer.mlp.partial(0, &mut out);
                layer.assert_is(&out, &stages()[1], "after a time-out");
            }
        }
    }
    let mut layer = layer(&device, |options| options.most_spins = endless);
    layer.mlp.launch(3).unwrap();
    layer.mlp.abort().unwrap();
    run(&mut layer, "after an abort");
}

#[test]
fn what_cannot_run_is_refused() {
    let device = device();
    let shape = |hidden, block_neurons, block_stride| MlpShape {
        dtype: DType::F16,
        hidden,
        block_neurons,
        block_stride,
    };
    for bad in [shape(20, 1, 128), shape(64, 65, 65 * 384), shape(64, 2, 704), shape(64, 1, 400)] {
        let error = StagedMlp::new(&device, bad, StagedOptions::new(&device, 4)).unwrap_err();
        assert!(error.is_unsupported(), "{bad:?}: {error}");
    }
}
