//! CUDA: the FFN of a token as one kernel that is fed while it runs, on slots that the engine fills from the disk.
//! Needs a device: `cargo test -p ls-engine --test devices cuda -- --ignored`.

use crate::{CONTEXT, Sample};
use ls_bundle::Bundle;
use ls_compute::ComputeBackend;
use ls_cpu::KvDType;
use ls_cuda::{CudaBackend, CudaOptions, Device, KernelSource, Loads};
use ls_engine::system::{Columns, System};

/// As OpenCL's; where all neurons run only rounding differs.
const ERRORS_MAX: [(Option<f32>, f64); 4] =
    [(None, 1e-6), (Some(1.0), 1e-6), (Some(0.0), 1e-4), (Some(0.3), 5e-2)];

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn it_says_what_the_processor_says() {
    let device = Device::open(0, &KernelSource::default());
    let device = device.unwrap_or_else(|error| panic!("needs an NVIDIA GPU: {error}"));
    let best = Loads::best(device.info().capability);
    let sample = Sample::new();
    for (staged, in_place, loads) in [
        (false, None, best),
        (true, None, best),
        (true, None, Loads::Plain),
        (true, Some(true), best),
    ] {
        let make = |bundle: &Bundle, pass_tokens| -> Box<dyn ComputeBackend> {
            let (context, kv_cache, loads) = (CONTEXT, KvDType::F16, Some(loads));
            let scored_tokens = 0;
            let options = CudaOptions {
                context,
                pass_tokens,
                scored_tokens,
                kv_cache,
                loads,
                in_place,
                staged,
            };
            let (model, vectors) = (bundle.model(), bundle.vectors());
            Box::new(CudaBackend::new(&device, model, vectors, &options).unwrap())
        };
        for (share, error_max) in ERRORS_MAX {
            let columns = share.and_then(|share| Columns::of(System::LeanStreamBase, share));
            for weight_cache in [1.0, 0.5, 0.3] {
                let error = sample.error(columns, weight_cache, &make);
                let what = format!(
                    "staged {staged}, in place {in_place:?}, {loads:?}, share {share:?}, cache {weight_cache}"
                );
                eprintln!("{what}: error {error:e}");
                assert!(error <= error_max, "{what}: error {error:e}");
            }
        }
    }
}
