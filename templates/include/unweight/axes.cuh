// Axes with named values, as unweight-codegen/src/family declares them. A generated Config names its values, for
// example `static constexpr uw::Epilogue kEpilogue = uw::Epilogue::kStoreAdd;`.
#pragma once

#include "unweight/ptx/types.cuh"

namespace uw {

enum class SmemCopy : u32 { kBulk, kAsync };
enum class Epilogue : u32 { kStore, kStoreAdd, kSiluMul };

enum class AttentionStep : u32 { kDecode, kPrefill };
enum class EncodeCompactStage : u32 { kQuads, kSizes, kWrite };
enum class DecodeElement : u32 { kBf16, kE4m3, kE5m2, kF16, kF32 };
enum class DecodeOutput : u32 { kFull, kExponent, kPalette };
enum class EmbedSource : u32 { kBf16, kPacked };
enum class EncodeHuffmanStage : u32 { kStats, kTable, kRows, kScan, kWrite, kPalette };
enum class JoinSource : u32 { kExponent, kPalette };
enum class KvCache : u32 { kBf16, kPacked };
enum class KvPackStage : u32 { kStep, kChunk, kRelease };
enum class NormKind : u32 { kRms, kRmsOnce, kLayer, kRmsPlusOne, kLayerBias };
enum class PackStage : u32 { kTiles, kLists };
enum class RouteStage : u32 { kTopk, kSort, kCombine, kTopkSigmoid, kTopkSparseMixer };
enum class ScaleForm : u32 { kMul, kAdd, kCap };
enum class GateFunction : u32 { kSilu, kGelu };
enum class UpdateStage : u32 { kPlaces, kCount, kTiles, kLists };
enum class DecodeCompactStage : u32 { kFull, kPacked, kLists };
enum class WeightSource : u32 { kExponent, kPalette };

// kAsync: threads copy 16 bytes at a time (cp.async); otherwise an elected lane issues bulk copies (cp.async.bulk).
template <class Config>
constexpr bool kAsync = Config::kCopy == SmemCopy::kAsync;
// y += instead of y =, added in fp32 and rounded once.
template <class Config>
constexpr bool kStoreAdd = Config::kEpilogue == Epilogue::kStoreAdd;
// y[m, n / 2] = silu(gate) * up.
template <class Config>
constexpr bool kSiluMul = Config::kEpilogue == Epilogue::kSiluMul;

}  // namespace uw
