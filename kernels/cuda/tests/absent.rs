//! Without CUDA everything builds and starts, and says what is missing.

use ls_cuda::{Device, KernelSource};

#[test]
fn a_missing_device_is_an_error_that_says_so() {
    // No machine has that many.
    let error = Device::open(1000, &KernelSource::default()).unwrap_err();
    assert!(error.is_absent() && !error.is_unsupported(), "{error}");
    let text = error.to_string();
    assert!(text.contains("no CUDA"), "{text}");
}
