//! The suite of `ls-compute` on a device. Needs one: `cargo test -p ls-cuda --test conformance -- --ignored`.

use ls_bundle::model::DType;
use ls_compute::conformance::{Setup, TinyModel, base_models, check, check_base, models};
use ls_compute::{ComputeBackend, KvDType};
use ls_cuda::{CudaBackend, CudaOptions, Device, KernelSource, Loads};

const NO_DEVICE: &str = "needs an NVIDIA GPU";

fn device() -> Device {
    Device::open(0, &KernelSource::default()).unwrap_or_else(|error| panic!("{NO_DEVICE}: {error}"))
}

fn make(device: &Device, loads: Loads) -> impl Fn(Setup<'_>) -> CudaBackend + use<'_> {
    move |setup| {
        let Setup { config, vectors, context, pass_tokens, scored_tokens, kv_cache, .. } = setup;
        let loads = Some(loads);
        let (in_place, staged) = (None, false);
        let options =
            CudaOptions { context, pass_tokens, scored_tokens, kv_cache, loads, in_place, staged };
        CudaBackend::new(device, config, &vectors, &options).unwrap()
    }
}

/// Backends that have a copy of all weights.
fn make_kept<'a>(
    device: &'a Device,
    model: &'a TinyModel,
    loads: Loads,
) -> impl Fn(Setup<'_>) -> CudaBackend + use<'a> {
    move |setup| {
        let mut backend = make(device, loads)(setup);
        assert!(backend.keep(&model.image));
        backend
    }
}

/// The ways of loading that the device has.
fn all_loads(device: &Device) -> Vec<Loads> {
    let best = Loads::best(device.info().capability);
    let all = [Loads::Plain, Loads::Async, Loads::Bulk];
    let last = all.iter().position(|&loads| loads == best).unwrap();
    all[..=last].to_vec()
}

fn suite(dtype: DType, kv_cache: KvDType, seed: u64) {
    let device = device();
    for model in models(dtype, kv_cache, seed) {
        for loads in all_loads(&device) {
            eprintln!("{}, {loads:?}", model.label());
            check(&model, &make_kept(&device, &model, loads));
        }
        check(&model, &make(&device, Loads::best(device.info().capability)));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn f16() {
    suite(DType::F16, KvDType::F16, 1);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn q8_0() {
    suite(DType::Q8_0, KvDType::F16, 2);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn q4_0() {
    suite(DType::Q4_0, KvDType::F16, 3);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn q8_0_cache() {
    suite(DType::F16, KvDType::Q8_0, 4);
}

/// As on a device that has the host's memory.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn weights_read_in_place() {
    let device = device();
    let in_place = |setup: Setup<'_>, model: &TinyModel| {
        let Setup { config, vectors, context, pass_tokens, scored_tokens, kv_cache, .. } = setup;
        let (loads, in_place, staged) = (None, Some(true), false);
        let options =
            CudaOptions { context, pass_tokens, scored_tokens, kv_cache, loads, in_place, staged };
        let mut backend = CudaBackend::new(&device, config, &vectors, &options).unwrap();
        // Memory is pinned once: of two backends at the same time the second copies it in parts.
        if backend.keep(&model.image) {
            assert_eq!(backend.kept().0, 0, "nothing is copied");
        }
        backend
    };
    for model in models(DType::Q4_0, KvDType::F16, 5) {
        check(&model, &|setup| in_place(setup, &model));
    }
}

/// Bits of gate, up and down.
const BITS: [[u32; 3]; 7] =
    [[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4], [2, 3, 2], [1, 4, 3], [3, 3, 0]];

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sparse_decode() {
    let device = device();
    let best = Loads::best(device.info().capability);
    let model = &base_models(DType::F16, 9)[0];
    for (bits, seed) in BITS.into_iter().zip(10..) {
        eprintln!("{bits:?} bits");
        check_base(model, bits, seed, &make(&device, best));
    }
    let bits = BITS.iter().cycle().skip(2);
    let models = [DType::F16, DType::Q8_0, DType::Q4_0].map(|dtype| base_models(dtype, 20));
    for ((model, &bits), seed) in models.iter().flatten().zip(bits).zip(21..) {
        eprintln!("{}, {bits:?} bits", model.label());
        check_base(model, bits, seed, &make_kept(&device, model, best));
    }
}
