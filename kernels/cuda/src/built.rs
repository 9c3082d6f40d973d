//! Machine code that is built in, written by `make kernels`.

/// Architectures that are built in, compute capability times ten, each with the version of its NVRTC.
pub const BUILT: &[(u32, &str)] = &[(72, "11.8"), (87, "11.8"), (90, "12.6")];

/// Hash of the text that they were made of, [`text_hash`](crate::text_hash).
pub const BUILT_FROM: u64 = 0xa99ba328addea60d;

/// The modules in the order of [`module_names`](crate::module_names).
pub(crate) fn find(arch: u32) -> Option<[&'static [u8]; 5]> {
    match arch {
        72 => Some([
            include_bytes!("../built/mlp.sm_72.cubin"),
            include_bytes!("../built/model.sm_72.cubin"),
            include_bytes!("../built/attention.sm_72.cubin"),
            include_bytes!("../built/base.sm_72.cubin"),
            include_bytes!("../built/sync.sm_72.cubin"),
        ]),
        87 => Some([
            include_bytes!("../built/mlp.sm_87.cubin"),
            include_bytes!("../built/model.sm_87.cubin"),
            include_bytes!("../built/attention.sm_87.cubin"),
            include_bytes!("../built/base.sm_87.cubin"),
            include_bytes!("../built/sync.sm_87.cubin"),
        ]),
        90 => Some([
            include_bytes!("../built/mlp.sm_90.cubin"),
            include_bytes!("../built/model.sm_90.cubin"),
            include_bytes!("../built/attention.sm_90.cubin"),
            include_bytes!("../built/base.sm_90.cubin"),
            include_bytes!("../built/sync.sm_90.cubin"),
        ]),
        _ => None,
    }
}
