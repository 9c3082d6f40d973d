//! The suite of `ls-compute` on every instruction set and number format.

use ls_bundle::model::DType;
use ls_compute::conformance::{Setup, check, models};
use ls_cpu::{CpuBackend, Kernels};

fn make(kernels: Kernels) -> impl Fn(Setup<'_>) -> CpuBackend {
    move |setup| {
        let Setup { config, vectors, context, pass_tokens, scored_tokens, threads } = setup;
        CpuBackend::new(config, vectors, context, pass_tokens, scored_tokens, threads, kernels)
            .unwrap()
    }
}

fn suite(dtype: DType, kernels: Kernels, seed: u64) {
    eprintln!("seed {seed}, {}", kernels.name());
    for model in models(dtype, seed) {
        check(&model, &make(kernels));
    }
}

#[test]
fn f16_scalar() {
    suite(DType::F16, Kernels::scalar(), 1);
}

#[test]
fn f16_detected() {
    suite(DType::F16, Kernels::detect(), 2);
}

#[test]
fn q8_0_detected() {
    suite(DType::Q8_0, Kernels::detect(), 3);
}

#[test]
fn q4_0_detected() {
    suite(DType::Q4_0, Kernels::detect(), 4);
}

#[test]
fn every_instruction_set_once() {
    for (kernels, seed) in Kernels::available().zip(5..) {
        for dtype in [DType::F16, DType::Q8_0, DType::Q4_0] {
            let model = &models(dtype, seed)[1];
            check(model, &make(kernels));
        }
    }
}
