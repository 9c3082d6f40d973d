//! The suite of `ls-compute` on every instruction set and number format.

use ls_bundle::model::DType;
use ls_compute::KvDType;
use ls_compute::conformance::{Setup, base_models, check, check_base, models};
use ls_cpu::{CpuBackend, CpuOptions, Kernels};

fn make(kernels: Kernels) -> impl Fn(Setup<'_>) -> CpuBackend {
    move |setup| {
        let Setup { config, vectors, context, pass_tokens, scored_tokens, threads, kv_cache } =
            setup;
        let options =
            CpuOptions { context, pass_tokens, scored_tokens, threads, kv_cache, kernels };
        CpuBackend::new(config, vectors, &options).unwrap()
    }
}

fn suite(dtype: DType, kv_cache: KvDType, kernels: Kernels, seed: u64) {
    eprintln!("seed {seed}, {}", kernels.name());
    for model in models(dtype, kv_cache, seed) {
        check(&model, &make(kernels));
    }
}

#[test]
fn f16_scalar() {
    suite(DType::F16, KvDType::F16, Kernels::scalar(), 1);
}

#[test]
fn f16_detected() {
    suite(DType::F16, KvDType::F16, Kernels::detect(), 2);
}

#[test]
fn q8_0_detected() {
    suite(DType::Q8_0, KvDType::F16, Kernels::detect(), 3);
}

#[test]
fn q4_0_detected() {
    suite(DType::Q4_0, KvDType::F16, Kernels::detect(), 4);
}

#[test]
fn q8_0_cache_detected() {
    suite(DType::F16, KvDType::Q8_0, Kernels::detect(), 5);
}

#[test]
fn every_instruction_set_once() {
    for (kernels, seed) in Kernels::available().zip(6..) {
        for (dtype, kv_cache) in
            [(DType::F16, KvDType::F16), (DType::Q8_0, KvDType::Q8_0), (DType::Q4_0, KvDType::Q8_0)]
        {
            check(&models(dtype, kv_cache, seed)[1], &make(kernels));
        }
    }
}

/// Bits of gate, up and down.
const BITS: [[u32; 3]; 7] =
    [[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4], [2, 3, 2], [1, 4, 3], [3, 3, 0]];

#[test]
fn sparse_decode_with_all_bits() {
    let model = &base_models(DType::F16, 9)[0];
    for (bits, seed) in BITS.into_iter().zip(10..) {
        eprintln!("{bits:?} bits");
        check_base(model, bits, seed, &make(Kernels::detect()));
    }
}

#[test]
fn sparse_decode_of_every_model_and_format() {
    let bits = BITS.iter().cycle().skip(2);
    let models = [DType::F16, DType::Q8_0, DType::Q4_0].map(|dtype| base_models(dtype, 20));
    for ((model, &bits), seed) in models.iter().flatten().zip(bits).zip(21..) {
        eprintln!("{}, {bits:?} bits", model.label());
        check_base(model, bits, seed, &make(Kernels::detect()));
    }
}

#[test]
fn sparse_decode_of_every_instruction_set() {
    for (kernels, seed) in Kernels::available().zip(30..) {
        eprintln!("{}", kernels.name());
        check_base(&base_models(DType::F16, seed)[1], [3, 3, 3], seed, &make(kernels));
    }
}

#[test]
fn quantised_caches_want_whole_groups() {
    let model = &models(DType::F16, KvDType::F16, 1)[3];
    let options = CpuOptions {
        context: 1,
        pass_tokens: 1,
        scored_tokens: 0,
        threads: 1,
        kv_cache: KvDType::Q8_0,
        kernels: Kernels::detect(),
    };
    let error = CpuBackend::new(&model.config, model.vectors.clone(), &options).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("8 wide"), "{error}");
    let options = CpuOptions { context: 0, kv_cache: KvDType::F16, ..options };
    let error = CpuBackend::new(&model.config, model.vectors.clone(), &options).unwrap_err();
    assert!(!error.is_unsupported(), "{error}");
}
