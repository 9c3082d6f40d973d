//! [`Accelerator`]: what computes, if not the processor.

use crate::args::BackendChoice;
use ls_bundle::ids::ByteCount;
use ls_bundle::model::{ModelConfig, Vectors};
use ls_compute::ComputeBackend;
use ls_cpu::CpuOptions;
use ls_cuda::{CudaBackend, CudaOptions, KernelSource};
use ls_engine::memory::BackendBytes;
use ls_opencl::{OpenClBackend, OpenClOptions, Wanted};

/// An open device.
#[derive(Debug)]
pub(crate) enum Accelerator {
    /// An NVIDIA GPU.
    Cuda(ls_cuda::Device),
    /// Whatever an OpenCL driver offers.
    OpenCl(ls_opencl::Device),
}

impl Accelerator {
    /// The device that was asked for; None: the processor. Says on stderr what was found.
    pub(crate) fn open(choice: BackendChoice) -> anyhow::Result<Option<Accelerator>> {
        match choice {
            BackendChoice::Cpu => Ok(None),
            BackendChoice::Cuda => Ok(Some(Accelerator::Cuda(cuda()?))),
            BackendChoice::OpenCl => Ok(Some(opencl(Wanted::Any)?)),
            BackendChoice::Auto => {
                let no_cuda = match cuda() {
                    Ok(device) => return Ok(Some(Accelerator::Cuda(device))),
                    Err(error) if error.is_absent() => error,
                    Err(error) => return Err(error.into()),
                };
                match opencl(Wanted::Gpu) {
                    Ok(device) => Ok(Some(device)),
                    Err(error) if error.is_absent() => {
                        eprintln!("{no_cuda}; {error}; the processor computes");
                        Ok(None)
                    }
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// Memory of the host that the backend takes: pinned beside a card's own, all of it where the device has the host's.
    pub(crate) fn host_bytes(
        &self,
        config: &ModelConfig,
        options: &CpuOptions,
        staged: bool,
    ) -> BackendBytes {
        let (own, host) = self.bytes(config, options, staged);
        let activations = if self.is_unified() { own + host } else { host };
        BackendBytes { kv_cache: ByteCount(0), activations }
    }

    /// What the backend's own buffers take of a card's memory, and all of that memory; None where the device has the host's.
    pub(crate) fn device_bytes(
        &self,
        config: &ModelConfig,
        options: &CpuOptions,
        staged: bool,
    ) -> Option<(ByteCount, ByteCount)> {
        let all = match self {
            Accelerator::Cuda(device) => device.info().memory_bytes,
            Accelerator::OpenCl(device) => device.info().memory_bytes,
        };
        let own = self.bytes(config, options, staged).0;
        (!self.is_unified()).then_some((own, ByteCount(all)))
    }

    fn bytes(
        &self,
        config: &ModelConfig,
        options: &CpuOptions,
        staged: bool,
    ) -> (ByteCount, ByteCount) {
        match self {
            Accelerator::Cuda(_) => CudaBackend::memory(config, &cuda_options(options, staged)),
            Accelerator::OpenCl(_) => OpenClBackend::memory(config, &opencl_options(options)),
        }
    }

    fn is_unified(&self) -> bool {
        match self {
            Accelerator::Cuda(device) => device.info().unified,
            Accelerator::OpenCl(device) => device.info().unified,
        }
    }

    /// A backend for one model. If it may not run in stages, tokens do not depend on how weights arrive.
    pub(crate) fn backend(
        &self,
        config: &ModelConfig,
        vectors: &Vectors,
        options: &CpuOptions,
        staged: bool,
    ) -> anyhow::Result<Box<dyn ComputeBackend>> {
        Ok(match self {
            Accelerator::Cuda(device) => {
                let options = cuda_options(options, staged);
                Box::new(CudaBackend::new(device, config, vectors, &options)?)
            }
            Accelerator::OpenCl(device) => {
                Box::new(OpenClBackend::new(device, config, vectors, &opencl_options(options))?)
            }
        })
    }
}

fn cuda() -> Result<ls_cuda::Device, ls_cuda::CudaError> {
    ls_cuda::Device::open(0, &KernelSource::default())
}

fn opencl(wanted: Wanted) -> Result<Accelerator, ls_opencl::OpenClError> {
    let device = ls_opencl::Device::open(wanted)?;
    eprintln!("{}", device.info().describe());
    Ok(Accelerator::OpenCl(device))
}

/// The same sizes for a card.
fn cuda_options(options: &CpuOptions, staged: bool) -> CudaOptions {
    let CpuOptions { context, pass_tokens, scored_tokens, kv_cache, .. } = *options;
    let (loads, in_place) = (None, None);
    CudaOptions { context, pass_tokens, scored_tokens, kv_cache, loads, in_place, staged }
}

fn opencl_options(options: &CpuOptions) -> OpenClOptions {
    let CpuOptions { context, pass_tokens, scored_tokens, kv_cache, .. } = *options;
    OpenClOptions { context, pass_tokens, scored_tokens, kv_cache, in_place: None }
}
