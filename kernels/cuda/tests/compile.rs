//! That the machine code is what the text says, and that the text compiles for every architecture.

use ls_cuda::{BUILT, BUILT_FROM, Nvrtc, compile, module_names, text_hash};
use std::path::Path;

#[test]
fn machine_code_is_of_this_text() {
    assert_eq!(BUILT_FROM, text_hash(), "the kernels have changed: run `make kernels`");
    let architectures: Vec<u32> = BUILT.iter().map(|&(arch, _)| arch).collect();
    assert_eq!(architectures, [72, 87, 90]);
}

/// The three ways of loading, each on the first architecture that has it.
#[test]
#[ignore = "needs NVRTC in artifacts/nvrtc: `make nvrtc` fetches it"]
fn every_kernel_compiles() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/nvrtc/cuda12");
    let nvrtc = Nvrtc::find(12, &[folder]).expect("NVRTC is there");
    for module in module_names() {
        for arch in [72, 87, 90] {
            let code = compile(&nvrtc, module, arch).unwrap_or_else(|error| panic!("{error}"));
            assert!(code.starts_with(b"\x7fELF"), "{module} for sm_{arch}");
        }
    }
}
