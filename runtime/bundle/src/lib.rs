//! The LeanStream bundle: one file that holds a model ready to be streamed.
pub mod extent;
pub mod ids;
pub mod model;
