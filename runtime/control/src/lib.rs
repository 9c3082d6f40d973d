//! How often reading and computing talk to each other, decided anew for each layer (paper, 3.2.3).
//!
//! At the end of a layer the engine knows how many bytes of the next one are still to be loaded. A [`Controller`] answers
//! with a [`CoordinationPlan`]; the paper's looks the answer up ([`Lut`], Eq. 9). Where that table comes from is here too,
//! as a device may make its own: [`explore`] measures, a [`profile`] keeps what was measured, [`fit`] tells from it what
//! layers cost, [`execution`] is the model of a layer (Eq. 4), [`bellman`] the optimum over several (Eq. 7 and 8), and
//! [`synthesis`] puts them together. [`world`] is a made-up device to try all that on.
//!
//! Planning reads no clock, no file and no memory but its own, and allocates nothing. What is measured is kept in files of
//! its own, beside the bundle: a bundle is for many devices, they are for one.

#![forbid(unsafe_code)]

pub mod bellman;
mod controller;
mod error;
pub mod execution;
pub mod explore;
mod file;
pub mod fit;
mod lut;
mod plan;
pub mod profile;
mod quantize;
mod seal;
pub mod synthesis;
mod target;
pub mod world;

pub use controller::{Controller, Fixed, Hindsight};
pub use error::{ControlError, ErrorClass};
pub use lut::{Lut, MAX_LAYERS};
pub use plan::{
    CoordinationPlan, FREQUENCIES, Frequencies, LOGICAL_STAGES, MAX_SEGMENTS, Segments,
};
pub use quantize::{Quantizer, STATES, State};
pub use target::Target;
