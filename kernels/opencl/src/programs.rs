//! The kernels as text: which files make which program.

use crate::error::Kind;
use ls_bundle::model::DType;
use opencl3::context::Context;
use opencl3::device::Device as ClDevice;
use opencl3::program::Program;

const COMMON: &str = include_str!("../cl/common.cl");
const MODEL: &str = include_str!("../cl/model.cl");
const VECTORS: &str = include_str!("../cl/vectors.cl");
const ATTENTION: &str = include_str!("../cl/attention.cl");
const BASE: &str = include_str!("../cl/base.cl");
const STAGES: &str = include_str!("../cl/stages.cl");

/// Work-items of every work-group: SIZE of the kernels. One number for all, as drivers compile for it; no device has less,
/// and none that this is for is the worse for it.
pub(crate) const SIZE: usize = 64;

/// Standard of what a flag needs, newest first.
const STANDARDS_WITH_ATOMICS: [&str; 2] = ["-cl-std=CL3.0", "-cl-std=CL2.0"];

/// All but the kernel with flags.
pub(crate) struct Programs {
    of: [Program; 3],
    vectors: Program,
    attention: Program,
    base: Program,
}

/// A program without weights of one format.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    Vectors,
    Attention,
    Base,
}

impl Programs {
    pub(crate) fn build(context: &Context, device: ClDevice) -> Result<Programs, Kind> {
        let build = |name: &str, dtype: Option<DType>, text: &str| {
            compile(context, device, name, dtype, text, "-cl-std=CL1.2")
        };
        let model = |dtype| build("model", Some(dtype), MODEL);
        Ok(Programs {
            of: [model(DType::F16)?, model(DType::Q8_0)?, model(DType::Q4_0)?],
            vectors: build("vectors", None, VECTORS)?,
            attention: build("attention", None, ATTENTION)?,
            base: build("base", None, BASE)?,
        })
    }

    pub(crate) fn of(&self, dtype: DType) -> &Program {
        &self.of[number(dtype)]
    }

    pub(crate) fn part(&self, part: Part) -> &Program {
        match part {
            Part::Vectors => &self.vectors,
            Part::Attention => &self.attention,
            Part::Base => &self.base,
        }
    }
}

/// The program with flags; an error where the compiler lacks OpenCL C 2.0's atomics.
pub(crate) fn stages(context: &Context, device: ClDevice, dtype: DType) -> Result<Program, Kind> {
    let [newer, older] = STANDARDS_WITH_ATOMICS;
    let build = |standard| compile(context, device, "stages", Some(dtype), STAGES, standard);
    build(newer).or_else(|error| build(older).map_err(|_| error))
}

/// A format's number in `cl/common.cl`.
pub(crate) fn number(dtype: DType) -> usize {
    match dtype {
        DType::F16 => 0,
        DType::Q8_0 => 1,
        DType::Q4_0 => 2,
    }
}

fn compile(
    context: &Context,
    device: ClDevice,
    name: &str,
    dtype: Option<DType>,
    text: &str,
    standard: &str,
) -> Result<Program, Kind> {
    let dtype = dtype.map_or(String::new(), |dtype| format!("#define DTYPE {}\n", number(dtype)));
    // One string: cl3 hands lists of them over wrongly.
    let text = format!("#define SIZE {SIZE}\n{dtype}{COMMON}\n{text}");
    let of = |log: String| Kind::Compile { program: format!("{name}, {standard}"), log };
    let mut program =
        Program::create_from_source(context, &text).map_err(|error| of(error.to_string()))?;
    match program.build(&[device.id()], standard) {
        Ok(()) => Ok(program),
        Err(error) => {
            let log = program.get_build_log(device.id()).unwrap_or_default();
            Err(of(format!("{error}\n{log}")))
        }
    }
}
