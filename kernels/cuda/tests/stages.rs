//! The FFN in stages on a device. Needs one: `cargo test -p ls-cuda --test stages -- --ignored`.

use half::f16;
use ls_bundle::model::DType;
use ls_compute::conformance::Rng;
use ls_cuda::{Blocks, Device, Entry, KernelSource, Loads, MlpShape, StagedMlp, StagedOptions};

const HIDDEN: usize = 320;
const BLOCKS: u32 = 200;
/// |a - b|^2 / |b|^2 of f32 sums in any order.
const ERROR_MAX: f64 = 1e-10;

/// A layer, twice: blocks in device memory and in host memory, and its neurons as numbers.
struct Layer {
    mlp: StagedMlp,
    here: Blocks,
    there: Blocks,
    input: Vec<f32>,
    weights: Vec<f32>,
}

fn layer(loads: Loads, overlapping: bool) -> Layer {
    let device = Device::open(0, &KernelSource::default()).expect("needs an NVIDIA GPU");
    let mut rng = Rng(5);
    let halves: Vec<f16> =
        (0..BLOCKS as usize * 2 * 3 * HIDDEN).map(|_| f16::from_f32(0.15 * rng.unit())).collect();
    let bytes: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
    let shape = MlpShape {
        dtype: DType::F16,
        hidden: HIDDEN as u32,
        block_neurons: 2,
        block_stride: 2 * 3 * 2 * HIDDEN as u32,
    };
    let options = StagedOptions { multiprocessors: 32, loads, patience_ms: 300, overlapping };
    let mut mlp = StagedMlp::new(&device, shape, options).unwrap();
    let input: Vec<f32> = (0..HIDDEN).map(|_| rng.unit()).collect();
    mlp.set_input(&input).unwrap();
    let mut here = Blocks::on_device(&device, &shape, BLOCKS).unwrap();
    let mut there = Blocks::on_host(&device, &shape, BLOCKS).unwrap();
    here.write(&bytes).unwrap();
    there.write(&bytes).unwrap();
    Layer { mlp, here, there, input, weights: halves.iter().map(|half| half.to_f32()).collect() }
}

impl Layer {
    /// Every third block is in host memory.
    fn entry(&self, block: u32) -> Entry {
        if block.is_multiple_of(3) { self.there.entry(block) } else { self.here.entry(block) }
    }

    fn sum(&self, blocks: &[u32]) -> Vec<f64> {
        let mut sum = vec![0f64; HIDDEN];
        for &block in blocks {
            let all = &self.weights[block as usize * 6 * HIDDEN..][..6 * HIDDEN];
            for neuron in all.chunks_exact(3 * HIDDEN) {
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

    fn assert_is(&self, got: &[f32], blocks: &[u32], what: &str) {
        let want = self.sum(blocks);
        let difference: f64 = got.iter().zip(&want).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
        let error = difference / want.iter().map(|b| b * b).sum::<f64>();
        assert!(error <= ERROR_MAX, "{what}: error {error:e}");
    }
}

/// Blocks of five stages, one of them empty.
fn stages() -> [Vec<u32>; 5] {
    [
        (0..60).collect(),
        (60..61).collect(),
        Vec::new(),
        (100..190).rev().collect(),
        (61..90).collect(),
    ]
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sums_of_all_stages_come_in_order() {
    for (loads, overlapping) in [Loads::Plain, Loads::Async, Loads::Bulk]
        .into_iter()
        .flat_map(|loads| [(loads, false), (loads, true)])
    {
        let mut layer = layer(loads, overlapping);
        let mut out = vec![f32::NAN; HIDDEN];
        // Often enough that the rings of stages and entries come round.
        for launch in 0..40 {
            let before = layer.mlp.done();
            layer.mlp.launch(stages().len() as u32, false).unwrap();
            let mut so_far = Vec::new();
            for (stage, blocks) in (before..).zip(stages()) {
                let entries: Vec<Entry> = blocks.iter().map(|&b| layer.entry(b)).collect();
                layer.mlp.post(&entries).unwrap();
                so_far.extend(blocks);
                layer.mlp.wait_done(stage + 1).unwrap();
                layer.mlp.partial(stage, &mut out).unwrap();
                let what = format!("{loads:?}, launch {launch}, stage {stage}");
                layer.assert_is(&out, &so_far, &what);
            }
            layer.mlp.finish().unwrap();
            layer.mlp.output(&mut out).unwrap();
            layer.assert_is(&out, &so_far, "the last sum");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn stages_posted_ahead_and_launches_in_a_row() {
    let mut layer = layer(Loads::Bulk, true);
    let mut out = vec![f32::NAN; HIDDEN];
    for round in 0..20 {
        for _ in 0..50 {
            layer.mlp.launch(5, true).unwrap();
            for blocks in stages() {
                let entries: Vec<Entry> = blocks.iter().map(|&b| layer.entry(b)).collect();
                layer.mlp.post(&entries).unwrap();
            }
        }
        layer.mlp.finish().unwrap();
        layer.mlp.output(&mut out).unwrap();
        layer.assert_is(&out, &stages().concat(), &format!("round {round}"));
    }
}

/// Each posted before its launch, and so often that the ring of entries comes round.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn launches_of_one_stage() {
    for loads in [Loads::Plain, Loads::Async, Loads::Bulk] {
        let mut layer = layer(loads, true);
        let blocks: Vec<u32> = (0..170).collect();
        let entries: Vec<Entry> = blocks.iter().map(|&b| layer.entry(b)).collect();
        let mut out = vec![f32::NAN; HIDDEN];
        for round in 0..300 {
            for _ in 0..20 {
                layer.mlp.post(&entries).unwrap();
                layer.mlp.launch(1, true).unwrap();
            }
            layer.mlp.finish().unwrap();
            layer.mlp.output(&mut out).unwrap();
            layer.assert_is(&out, &blocks, &format!("one stage, round {round}"));
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_stage_that_never_comes_is_given_up() {
    let mut layer = layer(Loads::Bulk, true);
    let mut out = vec![f32::NAN; HIDDEN];
    for _ in 0..2 {
        layer.mlp.launch(2, false).unwrap();
        let entries: Vec<Entry> = (0..50).map(|b| layer.entry(b)).collect();
        layer.mlp.post(&entries).unwrap();
        let error = layer.mlp.finish().unwrap_err();
        assert!(error.is_timeout(), "{error}");
        // And it goes on.
        layer.mlp.launch(1, false).unwrap();
        layer.mlp.post(&entries).unwrap();
        layer.mlp.finish().unwrap();
        layer.mlp.output(&mut out).unwrap();
        layer.assert_is(&out, &(0..50).collect::<Vec<_>>(), "after a time-out");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_open_launch_takes_what_comes() {
    for loads in [Loads::Plain, Loads::Async, Loads::Bulk] {
        let mut layer = layer(loads, false);
        let mut out = vec![f32::NAN; HIDDEN];
        for launch in 0..60u32 {
            layer.mlp.open().unwrap();
            let mut so_far = Vec::new();
            for (number, blocks) in
                stages().into_iter().cycle().take(launch as usize % 7).enumerate()
            {
                let entries: Vec<Entry> = blocks.iter().map(|&b| layer.entry(b)).collect();
                layer.mlp.feed(&entries).unwrap();
                so_far.extend(blocks);
                assert!(layer.mlp.running() <= so_far.len());
                if (launch + number as u32).is_multiple_of(3) {
                    layer.mlp.wait_blocks().unwrap();
                    assert_eq!(layer.mlp.running(), 0);
                }
            }
            layer.mlp.close().unwrap();
            layer.mlp.total(&mut out).unwrap();
            if so_far.is_empty() {
                assert!(out.iter().all(|&sum| sum == 0.0), "nothing was fed");
            } else {
                layer.assert_is(&out, &so_far, &format!("{loads:?}, launch {launch}"));
            }
        }
    }
}

/// Longer than the kernel's patience.
const LONG: std::time::Duration = std::time::Duration::from_millis(350);

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_open_launch_that_waits_pauses_and_goes_on() {
    let mut layer = layer(Loads::Bulk, false);
    let mut out = vec![f32::NAN; HIDDEN];
    for pauses in 0..4usize {
        layer.mlp.open().unwrap();
        let mut so_far = Vec::new();
        for (number, blocks) in stages().into_iter().enumerate() {
            if number < pauses {
                std::thread::sleep(LONG);
            }
            let entries: Vec<Entry> = blocks.iter().map(|&b| layer.entry(b)).collect();
            layer.mlp.feed(&entries).unwrap();
            so_far.extend(blocks);
        }
        if pauses == 3 {
            // It has nothing to start again for.
            std::thread::sleep(LONG);
        }
        layer.mlp.close().unwrap();
        layer.mlp.total(&mut out).unwrap();
        layer.assert_is(&out, &so_far, &format!("{pauses} pauses"));
        assert_eq!(layer.mlp.running(), 0);
    }
    // Just as long as its patience: either side may be first.
    for microseconds in (0..40).map(|step| 299_000 + step * 50) {
        layer.mlp.open().unwrap();
        let entries: Vec<Entry> = (0..50).map(|b| layer.entry(b)).collect();
        std::thread::sleep(std::time::Duration::from_micros(microseconds));
        layer.mlp.feed(&entries).unwrap();
        layer.mlp.close().unwrap();
        layer.mlp.total(&mut out).unwrap();
        layer.assert_is(&out, &(0..50).collect::<Vec<_>>(), &format!("{microseconds} us"));
    }
}
