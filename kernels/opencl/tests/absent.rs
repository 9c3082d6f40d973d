//! Without a graphics processor there is none, and the error says so.

use ls_opencl::{Device, Wanted};

#[test]
fn a_graphics_processor_is_one_or_absent() {
    match Device::open(Wanted::Gpu) {
        Ok(device) => assert!(device.info().is_gpu, "{}", device.info().describe()),
        Err(error) => {
            assert!(error.is_absent() && !error.is_unsupported(), "{error}");
            assert!(error.to_string().starts_with("no OpenCL"), "{error}");
        }
    }
}
