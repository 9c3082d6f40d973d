//! OpenCL: on the first device; where there is no graphics processor, on PoCL, which `tools/setup.sh` installs.

use crate::{CONTEXT, Sample};
use ls_bundle::Bundle;
use ls_compute::ComputeBackend;
use ls_cpu::KvDType;
use ls_engine::system::{Columns, System};
use ls_opencl::{Device, OpenClBackend, OpenClOptions, Wanted};

/// Errors by the share of neurons that run exactly; none: dense. The processor rounds activations to eight bits beside a
/// base. Where some neurons run that may choose others: the scores of random ones are close.
const ERRORS_MAX: [(Option<f32>, f64); 4] =
    [(None, 1e-6), (Some(1.0), 1e-6), (Some(0.0), 1e-4), (Some(0.3), 5e-2)];

#[test]
fn it_says_what_the_processor_says() {
    let device = Device::open(Wanted::Any);
    let device = device.unwrap_or_else(|error| panic!("tools/setup.sh helps: {error}"));
    let make = |bundle: &Bundle, pass_tokens| -> Box<dyn ComputeBackend> {
        let (context, kv_cache) = (CONTEXT, KvDType::F16);
        let options =
            OpenClOptions { context, pass_tokens, scored_tokens: 0, kv_cache, in_place: None };
        let (model, vectors) = (bundle.model(), bundle.vectors());
        Box::new(OpenClBackend::new(&device, model, vectors, &options).unwrap())
    };
    let sample = Sample::new();
    for (share, error_max) in ERRORS_MAX {
        let columns = share.and_then(|share| Columns::of(System::LeanStreamBase, share));
        let columns = columns.map(Columns::canonical);
        for weight_cache in [1.0, 0.5] {
            let error = sample.error(columns, weight_cache, &make);
            eprintln!("share {share:?}, cache {weight_cache}: error {error:e}");
            assert!(error <= error_max, "share {share:?}, cache {weight_cache}: error {error:e}");
        }
    }
}
