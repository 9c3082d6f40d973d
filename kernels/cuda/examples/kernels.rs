//! Builds the machine code that is compiled into the crate: `make kernels`, or
//! `cargo run -p ls-cuda --example kernels -- CUDA11_FOLDER CUDA12_FOLDER` with folders of Python packages (or of libraries)
//! that hold NVRTC 11.8 and 12.6.
//!
//! Each architecture gets the newest compiler whose code the driver of its usual system loads: a driver loads code of its own
//! major version and older. Jetson AGX Xavier (7.2) ends with JetPack 5, CUDA 11.4; AGX Orin (8.7) is also run with it;
//! bulk copies (9.0) begin with CUDA 12.

use ls_cuda::{Nvrtc, compile, module_names, text_hash};
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn main() {
    let folders: Vec<PathBuf> = std::env::args().skip(1).map(PathBuf::from).collect();
    let [cuda11, cuda12] = &folders[..] else {
        eprintln!("usage: kernels CUDA11_FOLDER CUDA12_FOLDER");
        std::process::exit(2);
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut list = String::new();
    let mut arms = String::new();
    for (arch, major, folder) in [(72, 11, cuda11), (87, 11, cuda11), (90, 12, cuda12)] {
        let nvrtc = Nvrtc::find(major, std::slice::from_ref(folder)).expect("NVRTC is there");
        let (found, minor) = nvrtc.version();
        assert_eq!(found, major as i32, "NVRTC of CUDA {major} in {}", folder.display());
        writeln!(list, "    ({arch}, \"{found}.{minor}\"),").expect("strings take all");
        writeln!(arms, "        {arch} => Some([").expect("strings take all");
        for module in module_names() {
            let code = compile(&nvrtc, module, arch).unwrap_or_else(|error| panic!("{error}"));
            let file = format!("{module}.sm_{arch}.cubin");
            eprintln!("{file}: {} bytes, NVRTC {found}.{minor}", code.len());
            std::fs::write(root.join("built").join(&file), code).expect("the file can be written");
            writeln!(arms, "            include_bytes!(\"../built/{file}\"),")
                .expect("strings take all");
        }
        writeln!(arms, "        ]),").expect("strings take all");
    }
    let modules = module_names().count();
    let text = format!(
        "//! Machine code that is built in, written by `make kernels`.\n\n\
         /// Architectures that are built in, compute capability times ten, each with the version of its NVRTC.\n\
         pub const BUILT: &[(u32, &str)] = &[\n{list}];\n\n\
         /// Hash of the text that they were made of, [`text_hash`](crate::text_hash).\n\
         pub const BUILT_FROM: u64 = {:#018x};\n\n\
         /// The modules in the order of [`module_names`](crate::module_names).\n\
         pub(crate) fn find(arch: u32) -> Option<[&'static [u8]; {modules}]> {{\n    \
         match arch {{\n{arms}        _ => None,\n    }}\n}}\n",
        text_hash()
    );
    std::fs::write(root.join("src/built.rs"), text).expect("the file can be written");
}
