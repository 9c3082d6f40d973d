//! The suite of `ls-compute` on the first OpenCL device; where there is no graphics processor, on PoCL, which
//! `tools/setup.sh` installs.

use ls_bundle::model::DType;
use ls_compute::conformance::{Setup, TinyModel, base_models, check, check_base, models};
use ls_compute::{ComputeBackend, KvDType};
use ls_opencl::{Device, OpenClBackend, OpenClOptions, Wanted};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// One device for all tests, one test at a time: PoCL 3.1 crashed where threads opened devices at once.
fn device() -> MutexGuard<'static, Device> {
    static DEVICE: LazyLock<Mutex<Device>> = LazyLock::new(|| {
        let device = Device::open(Wanted::Any);
        Mutex::new(device.unwrap_or_else(|error| panic!("tools/setup.sh helps: {error}")))
    });
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn make(device: &Device, in_place: Option<bool>) -> impl Fn(Setup<'_>) -> OpenClBackend + use<'_> {
    move |setup| {
        let Setup { config, vectors, context, pass_tokens, scored_tokens, kv_cache, .. } = setup;
        let options = OpenClOptions { context, pass_tokens, scored_tokens, kv_cache, in_place };
        OpenClBackend::new(device, config, &vectors, &options).unwrap()
    }
}

/// Backends that have all weights, as copies or in place.
fn make_kept<'a>(
    device: &'a Device,
    model: &'a TinyModel,
    in_place: bool,
) -> impl Fn(Setup<'_>) -> OpenClBackend + use<'a> {
    move |setup| {
        let mut backend = make(device, Some(in_place))(setup);
        assert!(backend.keep(&model.image));
        assert_eq!(backend.kept().0 == 0, in_place, "what is used in place is not copied");
        backend
    }
}

fn suite(dtype: DType, kv_cache: KvDType, seed: u64) {
    let device = device();
    for model in models(dtype, kv_cache, seed) {
        eprintln!("{}", model.label());
        check(&model, &make_kept(&device, &model, seed.is_multiple_of(2)));
        check(&model, &make(&device, None));
    }
}

#[test]
fn f16() {
    suite(DType::F16, KvDType::F16, 1);
}

#[test]
fn q8_0() {
    suite(DType::Q8_0, KvDType::F16, 2);
}

#[test]
fn q4_0() {
    suite(DType::Q4_0, KvDType::F16, 3);
}

#[test]
fn q8_0_cache() {
    suite(DType::F16, KvDType::Q8_0, 4);
}

/// As where a driver limits the pieces of memory: rows and blocks lie across borders, and some are not kept at all.
#[test]
fn weights_kept_in_pieces() {
    let device = device();
    for model in models(DType::Q4_0, KvDType::F16, 5) {
        check(&model, &|setup: Setup<'_>| {
            let mut backend = make(&device, Some(true))(setup);
            let pieces = model.image.chunks(64 * 37).enumerate();
            pieces
                .filter(|(index, _)| index % 5 != 3)
                .for_each(|(_, piece)| assert!(backend.keep(piece)));
            backend
        });
    }
}

/// Bits of gate, up and down.
const BITS: [[u32; 3]; 7] =
    [[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4], [2, 3, 2], [1, 4, 3], [3, 3, 0]];

#[test]
fn sparse_decode() {
    let device = device();
    let model = &base_models(DType::F16, 9)[0];
    for (bits, seed) in BITS.into_iter().zip(10..) {
        eprintln!("{bits:?} bits");
        check_base(model, bits, seed, &make(&device, None));
    }
    let bits = BITS.iter().cycle().skip(2);
    let models = [DType::F16, DType::Q8_0, DType::Q4_0].map(|dtype| base_models(dtype, 20));
    for ((model, &bits), seed) in models.iter().flatten().zip(bits).zip(21..) {
        eprintln!("{}, {bits:?} bits", model.label());
        check_base(model, bits, seed, &make_kept(&device, model, true));
    }
}
